"""Effective scale and zero point: the values a learned range quantizes with, and is exported with.

    effective scale      = max(|scale|, SMALLEST_SCALE)
    effective zero point = round_half_even(clamp(zero_point, qmin, qmax))        where it is a learned float

The gradient of the scale is multiplied by its sign; the zero point has a straight-through gradient. Calibrated
scales are positive and calibrated zero points integer, so both are unchanged.
"""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST_SCALE = 2.0**-80
"""About 8e-25. Below it the residual of a quotient, x − q · scale, may underflow, by which kernels correct quotients
(``qtk.kernels.gpu.division``)."""


def effective_scale(scale: Tensor) -> Tensor:
    """``max(|scale|, SMALLEST_SCALE)``: the scale that quantization divides by.

    >>> effective_scale(torch.tensor([0.5, -0.25, 0.0])).tolist()
    [0.5, 0.25, 8.271806125530277e-25]
    """
    return scale.abs().clamp(min=SMALLEST_SCALE)


def effective_scale_backward(effective_gradient: Tensor, scale: Tensor) -> Tensor:
    """Gradient of ``scale`` from the gradient of the effective scale; 0 where it is clamped to ``SMALLEST_SCALE``."""
    return torch.where(scale.abs() >= SMALLEST_SCALE, effective_gradient * scale.sign(), 0.0)


def effective_zero_point(zero_point: Tensor, qmin: float, qmax: float) -> Tensor:
    """The zero point that quantization adds: a learned float32 one is clamped and rounded to a code, ties to even.

    >>> effective_zero_point(torch.tensor([0.5, 1.5, 99.0]), -8, 7).tolist()
    [0.0, 2.0, 7.0]
    """
    return zero_point.clamp(qmin, qmax).round() if zero_point.is_floating_point() else zero_point
