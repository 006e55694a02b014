"""The device of a model."""

from __future__ import annotations

import torch
from torch import nn


def device_of(model: nn.Module) -> torch.device:
    """The device of the first parameter or buffer; the CPU if there is none."""
    return next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
