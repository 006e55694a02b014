"""Affine quantization: the reference that every kernel and export is compared with.

    code  = clamp(round_half_even(x / scale) + zero_point, qmin, qmax)
    x̂     = (code - zero_point) · scale

in float32, with a true division: ONNX QuantizeLinear and DequantizeLinear, bit for bit. Half precision is widened to
float32 first and x̂ rounded back at the end. Scale and zero point are the effective ones of ``qtk.numerics.effective``.
Results carry no gradient; ``qtk.numerics.straight_through`` computes it.

>>> x, scale = torch.tensor([0.25, 0.75, -9.0]), torch.tensor([0.5])
>>> quantize(x, scale, None, (), -8, 7)          # 0.5 and 1.5 go to even
tensor([ 0,  2, -8], dtype=torch.int32)
>>> fake_quantize(x, scale, None, (), -8, 7)
tensor([ 0.,  1., -4.])
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from qtk.numerics.blocks import align, pieces, split_shape
from qtk.numerics.effective import effective_scale, effective_zero_point


def quantize(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: Sequence[int], qmin: int, qmax: int
) -> Tensor:
    """Codes of ``x``, int32. ±inf saturate; NaN is given the code of real 0.

    Shape: ``x`` any; ``scale`` and ``zero_point`` the qparam shape of ``block_size``; result as ``x``, same layout.

    Raises: SpecError if scale or zero point do not fit ``x``.
    """
    x, scale, zero_point = _detached(x, scale, zero_point, qmin, qmax)
    codes = torch.empty_like(x, dtype=torch.int32)
    for (part, out), (part_scale, zero) in pieces((x, codes), (scale, zero_point), block_size):
        assert part_scale is not None
        code = _code(part, part_scale, zero, qmin, qmax, torch.empty_like(part, dtype=torch.float32))
        out.copy_(torch.where(code.isnan(), 0.0 if zero is None else zero, code))
    return codes


def dequantize(codes: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: Sequence[int]) -> Tensor:
    """Real values of ``codes``, float32. Shape and Raises: as ``quantize``."""
    codes, scale, zero_point = _detached(codes, scale, zero_point)
    reals = torch.empty_like(codes, dtype=torch.float32)
    for (part, out), (part_scale, zero) in pieces((codes, reals), (scale, zero_point), block_size):
        assert part_scale is not None
        out.copy_(part)
        (out if zero is None else out.sub_(zero)).mul_(part_scale)
    return reals


def fake_quantize(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: Sequence[int], qmin: int, qmax: int
) -> Tensor:
    """``dequantize(quantize(x))`` in the dtype and layout of ``x``; NaN stays NaN.

    Shape and Raises: as ``quantize``.
    """
    x, scale, zero_point = _detached(x, scale, zero_point, qmin, qmax)
    result = torch.empty_like(x)
    for (part, out), (part_scale, zero) in pieces((x, result), (scale, zero_point), block_size):
        assert part_scale is not None
        in_place = out.dtype == torch.float32
        real = out if in_place else torch.empty_like(part, dtype=torch.float32)
        _code(part, part_scale, zero, qmin, qmax, real)
        (real if zero is None else real.sub_(zero)).mul_(part_scale)
        if not in_place:
            out.copy_(real)
    return result


def expand(values: Tensor, shape: Sequence[int], block_size: Sequence[int]) -> Tensor:
    """Scales or zero points as float32, broadcastable against a tensor of ``shape``.

    They are copied only where a block is shorter than its axis.

    Raises: SpecError if they do not fit ``shape``.
    """
    lined = align(values, shape, block_size)
    if not block_size:
        return lined.reshape(())
    split = split_shape(shape, block_size)[0]
    return lined if len(split) == len(shape) else lined.expand(split).reshape(tuple(shape))


def _detached(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, qmin: float = -math.inf, qmax: float = math.inf
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``x``, effective scale and effective zero point, detached from autograd."""
    zero = None if zero_point is None else effective_zero_point(zero_point.detach(), qmin, qmax)
    return x.detach(), effective_scale(scale.detach()), zero


def _code(part: Tensor, part_scale: Tensor, zero: Tensor | None, qmin: int, qmax: int, out: Tensor) -> Tensor:
    """Writes the codes of ``part`` into ``out`` as float32, and returns it."""
    torch.div(part.to(torch.float32), part_scale, out=out).round_()
    # adding 0 turns -0.0 into 0.0: integer codes have no negative zero
    return out.add_(0.0 if zero is None else zero).clamp_(qmin, qmax)
