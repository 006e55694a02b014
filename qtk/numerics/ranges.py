"""Scale and zero point for a range of real values."""

from __future__ import annotations

import torch
from torch import Tensor

from qtk.core.spec import QuantSpec
from qtk.errors import CalibrationError
from qtk.numerics.effective import SMALLEST_SCALE
from qtk.numerics.scale_formats import stored

LARGEST_REAL = torch.finfo(torch.float32).max * (1 - torch.finfo(torch.float32).eps)
"""Largest magnitude a code may dequantize to: the largest float32, less a margin for the rounding of the scale."""


def choose_range(minimum: Tensor, maximum: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor | None]:
    """The smallest scale, and the zero point, whose codes cover [minimum, maximum] and represent 0 exactly.

    Symmetric: ``scale = max(maximum / qmax, minimum / qmin)``. Asymmetric: the range is widened to hold 0,
    ``scale = (maximum - minimum) / (qmax - qmin)``, ``zero_point = round(qmin - minimum / scale)``. A range of width
    0 gets scale 1. With a ``scale_format`` the scale is rounded to that format (``qtk.numerics.scale_formats``).
    Every code dequantizes to a finite float32; for that, a range as wide as float32's is cut by up to one scale.

    >>> from qtk.core.dtypes import dtype
    >>> choose_range(torch.tensor([-1.0]), torch.tensor([254.0]), QuantSpec(dtype("uint8")))
    (tensor([1.]), tensor([1], dtype=torch.int32))

    Shape: minimum, maximum: the qparam shape of ``spec``; results the same, float32 and int32.

    Raises: CalibrationError if a bound is not finite or minimum > maximum.
    """
    low, high = minimum.to(torch.float64), maximum.to(torch.float64)
    wrong = ~(torch.isfinite(low) & torch.isfinite(high) & (low <= high))
    if bool(wrong.any()):
        first = tuple(wrong.nonzero()[0].tolist())
        raise CalibrationError(
            f"a range must be finite with minimum ≤ maximum; at {first} it is [{float(low[first])}, "
            f"{float(high[first])}], so are {int(wrong.sum())} of {wrong.numel()}; clean the data they were taken from"
        )
    return covering_range(low, high, spec)


def covering_range(low: Tensor, high: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor | None]:
    """As ``choose_range``, of bounds that are known to be finite: they are not looked at, so nothing is waited for.

    Shape: as ``choose_range``; ``low``, ``high`` float64, of shapes that broadcast to the result's.
    """
    low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    if spec.symmetric:
        scale = torch.maximum(high / spec.qmax, low / spec.qmin)
    else:
        scale = (high - low) / (spec.qmax - spec.qmin)
    scale = scale.masked_fill_(scale == 0, 1.0).clamp_(min=SMALLEST_SCALE).to(torch.float32)
    if spec.symmetric:
        if spec.scale_format is not None:
            scale = stored(torch.maximum(high, -low).to(torch.float32), scale, spec)
        return held_scale(scale, 0.0, spec), None
    zero_point = (spec.qmin - low / scale.to(torch.float64)).round().clamp(spec.qmin, spec.qmax)
    return held_scale(scale, zero_point, spec), zero_point.to(torch.int32)


def held_scale(scale: Tensor, zero_point: Tensor | float, spec: QuantSpec) -> Tensor:
    """The scale, reduced where needed so that every code dequantizes to a finite float32.

    Shape: ``scale`` any, ``zero_point`` the same; result float32.
    """
    if not isinstance(zero_point, Tensor):
        zero_point = scale.new_full((), zero_point, dtype=torch.float64)
    zero_point = zero_point.to(torch.float64)
    farthest = torch.maximum((spec.qmax - zero_point).abs(), (spec.qmin - zero_point).abs())
    return torch.minimum(scale.to(torch.float32), (LARGEST_REAL / farthest).to(torch.float32))
