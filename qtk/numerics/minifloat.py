"""Minifloats (FP8, FP6, FP4): rounding to the nearest number of a format, ties to even, saturating.

    x̂ = round_to(x / scale, format) · scale

in float32, with a true division: ONNX QuantizeLinear and DequantizeLinear to float8 with ``saturate=1``. NaN stays NaN,
±inf saturate. The gradient is the straight-through estimator of ``qtk.numerics.straight_through``, with the
rounded float in place of the code.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qtk.core.dtypes import FloatDtype
from qtk.numerics.blocks import align, split_shape, sum_blocks
from qtk.numerics.effective import effective_scale, effective_scale_backward

_BIAS, _MANTISSA_BITS = 127, 23
"""Exponent bias and mantissa bits of float32."""


def format_of(exponent_bits: int, mantissa_bits: int, largest: float) -> FloatDtype:
    """The format that three numbers describe; it has no name.

    >>> format_of(2, 1, 6.0).bits
    4
    """
    return FloatDtype("", 1 + exponent_bits + mantissa_bits, True, exponent_bits, mantissa_bits, largest)


def round_to(x: Tensor, format: FloatDtype) -> Tensor:
    """The nearest numbers of ``format``. Shape: ``x`` float32, any; result the same.

    >>> from qtk.core.dtypes import DTYPES
    >>> round_to(torch.tensor([0.24, 0.25, 0.75, 2.5, -5.0, 99.0]), DTYPES["fp4_e2m1"])
    tensor([ 0.,  0.,  1.,  2., -4.,  6.])
    """
    return _unbounded(x, format).clamp(-format.largest, format.largest)


def quantize(x: Tensor, scale: Tensor, block_size: Sequence[int], format: FloatDtype) -> Tensor:
    """``x / scale`` as numbers of ``format``, in float32. Shape and Raises: as ``fake_quantize``."""
    steps, _ = _in_steps(x, scale, block_size)
    return round_to(steps, format).reshape(x.shape)


def fake_quantize(x: Tensor, scale: Tensor, block_size: Sequence[int], format: FloatDtype) -> Tensor:
    """Fake-quantizes ``x``: rounds ``x / scale`` to ``format`` and multiplies by the scale.

    Shape: ``x`` any; ``scale`` the qparam shape of ``block_size``; result as ``x``, same dtype.

    Raises: SpecError if the scale does not fit ``x``.
    """
    return torch.empty_like(x).copy_(fake_quantized(x, scale, block_size, format))


def fake_quantized(x: Tensor, scale: Tensor, block_size: Sequence[int], format: FloatDtype) -> Tensor:
    """``fake_quantize`` in float32, in no layout of its own. Shape and Raises: as there."""
    steps, aligned_scale = _in_steps(x, scale, block_size)
    return (round_to(steps, format) * aligned_scale).reshape(x.shape)


def fake_quantize_backward(
    grad: Tensor, x: Tensor, scale: Tensor, block_size: Sequence[int], format: FloatDtype
) -> tuple[Tensor, Tensor]:
    """Gradients of ``x`` and ``scale``. Shape: as these; dtypes: as ``grad``, and float32."""
    inside, error = derivative_by_scale(x, scale, block_size, format)
    grad_split = grad.reshape(inside.shape)
    dx = torch.empty_like(x, dtype=grad.dtype).copy_(torch.where(inside, grad_split, 0.0).reshape(x.shape))
    summed = sum_blocks(grad_split * error, x.shape, block_size)
    return dx, effective_scale_backward(summed.reshape(scale.shape).to(torch.float32), scale)


def derivative_by_scale(
    x: Tensor, scale: Tensor, block_size: Sequence[int], format: FloatDtype
) -> tuple[Tensor, Tensor]:
    """Where a number is not clamped, and the derivative of x̂ by the effective scale. Shape: the split shape of x."""
    steps, _ = _in_steps(x, scale, block_size)
    number = _unbounded(steps, format)
    inside = number.abs() <= format.largest
    return inside, torch.where(inside, number - steps, number.clamp(-format.largest, format.largest))


def to_bits(numbers: Tensor, format: FloatDtype) -> Tensor:
    """The bits of numbers of ``format``: sign, exponent, mantissa.

    Shape: ``numbers`` float32, any; result the same, int64.

    >>> from qtk.core.dtypes import DTYPES
    >>> to_bits(torch.tensor([0.5, 1.0, 6.0, -0.5]), DTYPES["fp4_e2m1"]).tolist()
    [1, 2, 7, 9]
    """
    magnitude = torch.searchsorted(_magnitudes(format).to(numbers.device), numbers.abs())
    return magnitude + torch.signbit(numbers) * (1 << (format.bits - 1))


def from_bits(bits: Tensor, format: FloatDtype) -> Tensor:
    """The numbers whose bits ``to_bits`` gives. Shape: ``bits`` an integer dtype, any; result the same, float32."""
    magnitudes = _magnitudes(format)
    return torch.cat([magnitudes, -magnitudes]).to(bits.device)[bits.long()]


def _magnitudes(format: FloatDtype) -> Tensor:
    """The numbers without sign, in the order of their bits, which is ascending; codes of infinity and NaN too."""
    bits = torch.arange(1 << (format.bits - 1))
    exponent, mantissa = bits >> format.mantissa_bits, bits % (1 << format.mantissa_bits)
    smallest = smallest_exponent(format) - _BIAS
    fraction = mantissa / (1 << format.mantissa_bits) + (exponent > 0)
    return torch.ldexp(fraction, exponent.clamp(min=1) - 1 + smallest)


def smallest_exponent(format: FloatDtype) -> int:
    """Exponent of the smallest normal number of a format, with the bias of float32.

    >>> from qtk.core.dtypes import DTYPES
    >>> smallest_exponent(DTYPES["fp8_e4m3"]) - 127
    -6
    """
    return 2 - (1 << (format.exponent_bits - 1)) + _BIAS


def _unbounded(x: Tensor, format: FloatDtype) -> Tensor:
    """``round_to`` without saturation, as if the format had no largest exponent."""
    # the float32 with the exponent of x, and no smaller than the smallest normal number of the format
    smallest = smallest_exponent(format) << _MANTISSA_BITS
    exponent = x.view(torch.int32).bitwise_and(0xFF << _MANTISSA_BITS).clamp(min=smallest)
    unit = (exponent - (format.mantissa_bits << _MANTISSA_BITS)).view(torch.float32)
    return (x / unit).round() * unit


def _in_steps(x: Tensor, scale: Tensor, block_size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """``x / scale`` in the split shape of the blocks, and the scale broadcastable against it."""
    aligned_scale = align(effective_scale(scale), x.shape, block_size)
    split = split_shape(x.shape, block_size)[0]
    return x.to(torch.float32).reshape(split) / aligned_scale, aligned_scale
