"""From a range of reals to the scale and zero point that just hold it."""

from __future__ import annotations

import torch
from torch import Tensor

from qtk.core.spec import QuantSpec
from qtk.errors import CalibrationError

SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Smallest normal float32; a smaller scale would lose its own digits."""


def choose_range(minimum: Tensor, maximum: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point for which [minimum, maximum] just fits, with real 0 exact.

    Symmetric: ``scale = max(maximum / qmax, minimum / qmin)``. Asymmetric: the range is widened to hold 0,
    ``scale = (maximum - minimum) / (qmax - qmin)``, ``zero_point = round(qmin - minimum / scale)``. A range of width
    0 gets scale 1: its only real is 0 and every scale holds it.

    Shape: minimum, maximum: the qparam shape of ``spec``; results the same, float32 and int32.

    Raises: CalibrationError if a bound is not finite or minimum > maximum.
    """
    low, high = minimum.to(torch.float64), maximum.to(torch.float64)
    wrong = ~(torch.isfinite(low) & torch.isfinite(high) & (low <= high))
    if bool(wrong.any()):
        first = int(wrong.flatten().nonzero()[0])
        raise CalibrationError(
            f"a range must be finite with minimum ≤ maximum; number {first} is "
            f"[{float(low.flatten()[first])}, {float(high.flatten()[first])}]"
        )
    low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    if spec.symmetric:
        scale = torch.maximum(high / spec.qmax, low / spec.qmin)
    else:
        scale = (high - low) / (spec.qmax - spec.qmin)
    scale = torch.where(scale == 0, 1.0, scale.clamp(SMALLEST_SCALE, torch.finfo(torch.float32).max))
    scale = scale.to(torch.float32)
    if spec.symmetric:
        return scale, None
    zero_point = (spec.qmin - low / scale.to(torch.float64)).round().clamp(spec.qmin, spec.qmax)
    return scale, zero_point.to(torch.int32)
