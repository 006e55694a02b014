"""How a range that is being learned acts: as what it would be exported as.

A scale acts by its size, at least ``SMALLEST_SCALE``, and its gradient follows its sign; a float zero point acts as the
nearest code, and its gradient passes straight through. Numbers that are no longer learned act as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Smallest normal float32; a smaller scale would lose its own digits."""


def effective_scale(scale: Tensor) -> Tensor:
    """The scale as it acts.

    >>> effective_scale(torch.tensor([0.5, -0.25, 0.0])).tolist()
    [0.5, 0.25, 1.1754943508222875e-38]
    """
    return scale.abs().clamp(min=SMALLEST_SCALE)


def scale_gradient(of_acting: Tensor, scale: Tensor) -> Tensor:
    """Gradient of ``scale`` from that of ``effective_scale(scale)``; none where the bound acts instead."""
    return torch.where(scale.abs() >= SMALLEST_SCALE, of_acting * scale.sign(), 0.0)


def effective_zero_point(zero_point: Tensor, qmin: float, qmax: float) -> Tensor:
    """The zero point as it acts: one that is learned is float32 and acts as a code, ties to even.

    >>> effective_zero_point(torch.tensor([0.5, 1.5, 99.0]), -8, 7).tolist()
    [0.0, 2.0, 7.0]
    """
    return zero_point.clamp(qmin, qmax).round() if zero_point.is_floating_point() else zero_point
