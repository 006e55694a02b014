"""Dynamic quantization: scale and zero point computed from each tensor at run time.

    low, high  = min(min x, 0), max(max x, 0)                over the elements that share a scale
    asymmetric:  scale = (high - low) / (qmax - qmin)        zero_point = clamp(round_half_even(qmin - low / scale))
    symmetric:   scale = max(high / qmax, low / qmin)

in float32; for uint8 that is ONNX DynamicQuantizeLinear, bit for bit, wherever that is defined. A scale of 0 becomes 1;
others are at least the smallest normal float32, and small enough that every code dequantizes to a finite number. With a
NaN all elements that share its scale become NaN; ±inf saturate. ``qtk.numerics.ranges`` computes calibrated ranges by
the same formulas in float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qtk.core.granularity import WHOLE
from qtk.numerics import affine
from qtk.numerics.effective import SMALLEST_SCALE
from qtk.numerics.ranges import LARGEST_REAL
from qtk.numerics.statistics import min_max


def dynamic_range(
    low: Tensor, high: Tensor, qmin: float, qmax: float, *, symmetric: bool
) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point of tensors with minimum ``low`` and maximum ``high``.

    Shape: ``low``, ``high`` float32, any; results the same, float32 and int32, no zero point if symmetric.

    >>> dynamic_range(torch.tensor([-1.0]), torch.tensor([254.0]), 0, 255, symmetric=False)
    (tensor([1.]), tensor([1], dtype=torch.int32))
    """
    low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    scale = torch.maximum(high / qmax, low / qmin) if symmetric else (high - low) / (qmax - qmin)
    farthest = max(qmax, -qmin) if symmetric else qmax - qmin
    scale = torch.where(scale == 0, 1.0, scale.clamp(SMALLEST_SCALE, LARGEST_REAL / farthest))
    if symmetric:
        return scale, None
    zero_point = (qmin - low / scale).round().clamp(qmin, qmax)
    return scale, zero_point.nan_to_num(qmin).to(torch.int32)


def fake_quantize(
    x: Tensor, block_size: Sequence[int], qmin: int, qmax: int, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Fake-quantizes ``x`` by its own minimum and maximum. Returns: the result, the scales, the zero points.

    Shape: ``x`` any; the first result as ``x``, same layout; scale float32 and zero point int32 of ``scale_shape``, of
    shape [0] if symmetric. An empty tensor has scale 1.
    """
    shape = scale_shape(x.shape, block_size)
    if x.numel():
        low, high = (extreme.reshape(shape) for extreme in min_max(x.detach(), block_size))
    else:
        low = high = torch.zeros(shape, device=x.device)
    scale, zero_point = dynamic_range(low, high, qmin, qmax, symmetric=symmetric)
    result = affine.fake_quantize(x, scale, zero_point, block_size, qmin, qmax)
    return result, scale, scale.new_empty(0, dtype=torch.int32) if zero_point is None else zero_point


def scale_shape(shape: Sequence[int], block_size: Sequence[int]) -> tuple[int, ...]:
    """Shape of the scales: one length for each axis, 1 where a block spans it.

    >>> scale_shape((8, 197, 384), (1, 1, -1)), scale_shape((8, 5), ())
    ((8, 197, 1), (1,))
    """
    if not block_size:
        return (1,)
    return tuple(1 if size == WHOLE else length // size for length, size in zip(shape, block_size, strict=True))
