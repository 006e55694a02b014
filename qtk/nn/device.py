"""The device of a model."""

from __future__ import annotations

import torch
from torch import nn


def device_of(model: nn.Module) -> torch.device:
    """The device of the first parameter or buffer; the CPU if there is none."""
    return next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))


META = "the model is on the meta device, whose tensors have no values: make the simulation from a model with weights"
"""What cannot be done with a dry run."""


def is_dry_run(model: nn.Module) -> bool:
    """Whether tensors of the model have no values (meta)."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
