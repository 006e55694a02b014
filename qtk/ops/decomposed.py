"""``qtk::fake_quantize`` in plain aten, for compilers: they fuse it with neighbouring ops, forward and backward.

The formulas of ``qtk.numerics.affine`` and ``straight_through``, without their eager-mode optimizations. On GPUs
Inductor divides approximately by default: a value within a rounding error of a tie may get the next code unless
``torch._inductor.config.eager_numerics.division_rounding`` is set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qtk.numerics.blocks import align, split_shape, sum_blocks
from qtk.numerics.effective import effective_scale, effective_scale_backward, effective_zero_point


class FakeQuantize(torch.autograd.Function):
    """Forward and straight-through backward; arguments as ``qtk.ops.fake_quantize.fake_quantize``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: Sequence[int], qmin: int, qmax: int
    ) -> Tensor:
        ctx.save_for_backward(x, scale, zero_point)
        ctx.spec = block_size, qmin, qmax
        result = fake_quantized(x, scale, zero_point, block_size, qmin, qmax)
        return laid_out_as(x, x.dtype, result)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, zero_point = ctx.saved_tensors
        block_size, qmin, qmax = ctx.spec
        _, wants_scale, wants_zero_point, *_ = ctx.needs_input_grad
        ratio, _, zero = _scaled_and_aligned(x, scale, zero_point, block_size, qmin, qmax)
        upstream = grad.reshape(ratio.shape)
        code = ratio.round() + zero
        inside = (code >= qmin) & (code <= qmax)
        dx = laid_out_as(x, grad.dtype, torch.where(inside, upstream, 0.0).reshape(x.shape))
        of_scale = of_zero_point = None
        if wants_scale:
            error = torch.where(inside, code - zero - ratio, code.clamp(qmin, qmax) - zero)
            effective_gradient = sum_blocks(upstream * error, x.shape, block_size).reshape(scale.shape)
            of_scale = effective_scale_backward(effective_gradient, scale)
        if wants_zero_point:
            clipped = torch.where(inside, 0.0, upstream.float())
            of_zero_point = -(sum_blocks(clipped, x.shape, block_size).reshape(scale.shape) * effective_scale(scale))
        return dx, of_scale, of_zero_point, None, None, None


def laid_out_as(x: Tensor, dtype: torch.dtype, values: Tensor) -> Tensor:
    """The values with the strides of ``x``. Nothing is written in place: torch 2.11 loses the gradient of what was."""
    result: Tensor = torch.ops.aten.copy.default(torch.empty_like(x, dtype=dtype), values)
    return result


def fake_quantized(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: Sequence[int], qmin: int, qmax: int
) -> Tensor:
    """The forward alone, without a gradient of its own. Shape: as ``x``, float32."""
    ratio, step, zero = _scaled_and_aligned(x, scale, zero_point, block_size, qmin, qmax)
    code = (ratio.round() + zero).clamp(qmin, qmax)
    return ((code - zero) * step).reshape(x.shape)


def _scaled_and_aligned(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: Sequence[int], qmin: int, qmax: int
) -> tuple[Tensor, Tensor, Tensor | float]:
    """``x / scale``, the effective scale and the effective zero point, broadcastable against each other."""
    split = split_shape(x.shape, block_size)[0]
    step = align(effective_scale(scale), x.shape, block_size)
    zero = 0.0 if zero_point is None else align(effective_zero_point(zero_point, qmin, qmax), x.shape, block_size)
    return x.to(torch.float32).reshape(split) / step, step, zero
