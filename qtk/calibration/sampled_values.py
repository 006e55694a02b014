"""A few values of a tensor, to judge a range by."""

from __future__ import annotations

import torch
from torch import Tensor

SAMPLE = 256
"""Values that are kept of a tensor."""


def some_values(x: Tensor) -> Tensor:
    """About ``SAMPLE`` values, evenly spread in memory; a step that is odd meets all channels."""
    in_memory, step = x.permute(sorted(range(x.ndim), key=x.stride, reverse=True)), max(x.numel() // SAMPLE, 1) | 1
    try:
        return in_memory.view(-1)[::step].clone()  # nothing is copied but the sample
    except RuntimeError:  # a part of a tensor
        places = torch.unravel_index(torch.arange(0, x.numel(), step, device=x.device), in_memory.shape)
        return in_memory[places]
