"""Affine quantization, the definition every kernel, export and proof refers to.

    code  = clamp(round_half_even(x / scale) + zero_point, qmin, qmax)
    x̂     = (code - zero_point) · scale

in float32, with a true division: ONNX QuantizeLinear and DequantizeLinear, bit for bit. Half precision is widened to
float32 first and x̂ rounded back at the end.

>>> x, scale = torch.tensor([0.25, 0.75, -9.0]), torch.tensor([0.5])
>>> quantize(x, scale, None, (), -8, 7)          # 0.5 and 1.5 go to even
tensor([ 0,  2, -8], dtype=torch.int32)
>>> fake_quantize(x, scale, None, (), -8, 7)
tensor([ 0.,  1., -4.])
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def quantize(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: Sequence[int], qmin: int, qmax: int
) -> Tensor:
    """Codes of ``x``, int32. ±inf take the outermost codes; a NaN has no code and gets the one of real 0.

    Shape: ``x`` any; ``scale`` and ``zero_point`` the qparam shape of ``block_size``; result as ``x``.
    """
    nan_code = 0.0 if zero_point is None else expand(zero_point, x.shape, block_size)
    codes = _clamped(x, scale, zero_point, block_size, qmin, qmax)
    return torch.where(codes.isnan(), nan_code, codes).to(torch.int32)


def dequantize(codes: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: Sequence[int]) -> Tensor:
    """The float32 reals that ``codes`` stand for. Shape: as ``quantize``."""
    reals = codes.to(torch.float32)
    if zero_point is not None:
        reals = reals - expand(zero_point, codes.shape, block_size)
    return reals * expand(scale, codes.shape, block_size)


def fake_quantize(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: Sequence[int], qmin: int, qmax: int
) -> Tensor:
    """``dequantize(quantize(x))`` in the dtype and layout of ``x``; NaN stays NaN."""
    reals = _clamped(x, scale, zero_point, block_size, qmin, qmax)
    if zero_point is not None:
        reals.sub_(expand(zero_point, x.shape, block_size).round())
    return reals.mul_(expand(scale, x.shape, block_size)).to(x.dtype)


def expand(values: Tensor, shape: Sequence[int], block_size: Sequence[int]) -> Tensor:
    """Scales or zero points as float32, broadcastable against a tensor of ``shape``.

    Only blocks shorter than an axis are materialised.
    """
    values = values.to(torch.float32)
    if not block_size:
        return values.reshape(())
    if values.ndim != len(shape):  # per channel: one axis is kept
        return values.reshape([-1 if size == 1 else 1 for size in block_size])
    for axis, (length, count) in enumerate(zip(shape, values.shape, strict=True)):
        if count not in (1, length):
            values = values.repeat_interleave(length // count, dim=axis)
    return values


def _clamped(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: Sequence[int], qmin: int, qmax: int
) -> Tensor:
    """Codes as float32, in a new tensor with the layout of ``x``."""
    codes = torch.div(x.to(torch.float32), expand(scale, x.shape, block_size)).round_()
    # adding 0 turns -0.0 into 0.0: codes are integers and know no sign of zero
    return codes.add_(0.0 if zero_point is None else expand(zero_point, x.shape, block_size).round()).clamp_(qmin, qmax)
