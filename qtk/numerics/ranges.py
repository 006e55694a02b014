"""From a range of reals to the scale and zero point that just hold it."""

from __future__ import annotations

import torch
from torch import Tensor

from qtk.core.spec import QuantSpec
from qtk.errors import CalibrationError
from qtk.numerics.effective import SMALLEST_SCALE
from qtk.numerics.scale_formats import stored

LARGEST_REAL = torch.finfo(torch.float32).max * (1 - torch.finfo(torch.float32).eps)
"""Largest real a code may stand for: float32's largest, less the rounding of the scale."""


def choose_range(minimum: Tensor, maximum: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point for which [minimum, maximum] just fits, with real 0 exact.

    Symmetric: ``scale = max(maximum / qmax, minimum / qmin)``. Asymmetric: the range is widened to hold 0,
    ``scale = (maximum - minimum) / (qmax - qmin)``, ``zero_point = round(qmin - minimum / scale)``. A range of width
    0 gets scale 1: its only real is 0 and every scale holds it. Scales that are stored in few bits follow the rule of
    their format, ``qtk.numerics.scale_formats``. Every code stands for a finite float32; a range that reaches to the
    end of float32 loses up to one step for it.

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
    low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    if spec.symmetric:
        scale = torch.maximum(high / spec.qmax, low / spec.qmin)
    else:
        scale = (high - low) / (spec.qmax - spec.qmin)
    scale = torch.where(scale == 0, 1.0, scale.clamp(min=SMALLEST_SCALE)).to(torch.float32)
    if spec.symmetric:
        if spec.scale_format is not None:
            scale = stored(torch.maximum(high, -low).to(torch.float32), scale, spec)
        return held_scale(scale, torch.zeros_like(scale), spec), None
    zero_point = (spec.qmin - low / scale.to(torch.float64)).round().clamp(spec.qmin, spec.qmax)
    return held_scale(scale, zero_point, spec), zero_point.to(torch.int32)


def held_scale(scale: Tensor, zero_point: Tensor | float, spec: QuantSpec) -> Tensor:
    """The scale, made small enough for every ``(code - zero_point) · scale`` to be finite.

    Shape: ``scale`` any, ``zero_point`` alike; result float32.
    """
    zero_point = torch.as_tensor(zero_point, dtype=torch.float64, device=scale.device)
    farthest = torch.maximum((spec.qmax - zero_point).abs(), (spec.qmin - zero_point).abs())
    return torch.minimum(scale.to(torch.float32), (LARGEST_REAL / farthest).to(torch.float32))
