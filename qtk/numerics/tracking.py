"""A range that follows the values of its tensor, step by step, while the model trains.

    low, high  = min(min x, 0), max(max x, 0)                          over the elements that share a scale
    symmetric:   scale ← scale + momentum · (max(high / qmax, low / qmin) - scale)
    asymmetric:  the same for both ends of the range, (qmin - zero_point) · scale and (qmax - zero_point) · scale

A scale of 0 becomes 1. With momentum 1 that is ``qtk.numerics.ranges.choose_range``. The zero point is not rounded
here, or small moves would be lost; it is rounded where it is used.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qtk.numerics.effective import SMALLEST_SCALE


def tracked_range(
    low: Tensor, high: Tensor, scale: Tensor, zero_point: Tensor | None, *, momentum: float, qmin: float, qmax: float
) -> tuple[Tensor, Tensor | None]:
    """The range, moved by ``momentum`` towards [low, high]; as it was where these are not finite.

    Shape: all, and the results, in the qparam shape; float32, the zero point too.

    >>> scale, zero = tracked_range(torch.tensor([-1.0]), torch.tensor([254.0]), torch.ones(1), torch.zeros(1),
    ...                             momentum=0.5, qmin=0, qmax=255)
    >>> scale.tolist(), zero.tolist()
    ([1.0], [0.5])
    """
    low, high = low.to(torch.float64).clamp(max=0.0), high.to(torch.float64).clamp(min=0.0)
    old_scale = scale.to(torch.float64)
    if zero_point is None:
        moved = torch.lerp(old_scale, torch.maximum(high / qmax, low / qmin), momentum)
        positive = torch.where(moved == 0, 1.0, moved.clamp(min=SMALLEST_SCALE))
        return torch.where(torch.isfinite(moved), positive, old_scale).to(torch.float32), None
    old_low, old_high = (qmin - zero_point) * old_scale, (qmax - zero_point) * old_scale
    low, high = torch.lerp(old_low, low, momentum), torch.lerp(old_high, high, momentum)
    width = (high - low) / (qmax - qmin)
    moved = torch.where(width == 0, 1.0, width.clamp(min=SMALLEST_SCALE)).to(torch.float32)
    shifted = (qmin - low / moved.to(torch.float64)).clamp(qmin, qmax).to(torch.float32)
    keeps = ~torch.isfinite(width)
    return torch.where(keeps, scale, moved), torch.where(keeps, zero_point, shifted)
