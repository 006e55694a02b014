"""``qtk::fake_quantize_dynamic``: finds the range of a tensor and fake-quantizes it, in one op, with its gradient.

Formulas of ``qtk.numerics.dynamic``; ``block_size`` as in ``qtk.ops.fake_quantize``. With one scale per row the
kernels read each element from memory once. The gradient is the straight-through estimator of ``qtk::fake_quantize``
with the range as a constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qtk.numerics import dynamic
from qtk.numerics.blocks import split_shape
from qtk.ops.decomposed import FakeQuantize
from qtk.ops.fake_quantize import BACKWARD
from qtk.ops.forward_mode import refuse_forward_mode
from qtk.ops.registration import NATIVE, Gradient, Kernel, register
from qtk.ops.statistics import min_max
from qtk.torch_private import is_exporting


def _fake(
    input: Tensor, block_size: Sequence[int], qmin: int, qmax: int, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor]:
    scale = input.new_empty(dynamic.scale_shape(input.shape, block_size), dtype=torch.float32)
    return torch.empty_like(input), scale, scale.new_empty(0 if symmetric else scale.shape, dtype=torch.int32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    input, *ctx.spec, ctx.symmetric = inputs
    _, scale, zero_point = output
    ctx.mark_non_differentiable(scale, zero_point)
    ctx.save_for_backward(input, scale, zero_point)


def _backward(ctx: Any, grad: Tensor, *of_range: Tensor | None) -> tuple[Tensor | None, ...]:
    input, scale, zero_point = ctx.saved_tensors
    dx, _, _ = BACKWARD(grad, input, scale, None if ctx.symmetric else zero_point, *ctx.spec, False, False)
    return dx, None, None, None, None


_OP = register(
    "fake_quantize_dynamic(Tensor input, int[] block_size, int qmin, int qmax, bool symmetric) -> "
    "(Tensor, Tensor, Tensor)",
    dynamic.fake_quantize, _fake, gpu=Kernel("fake_quantize_dynamic", "fake_quantize_dynamic"),
    gradient=Gradient(_save, _backward), native=True,
)


def fake_quantize_dynamic(x: Tensor, block_size: Sequence[int], qmin: int, qmax: int, *, symmetric: bool) -> Tensor:
    """Fake-quantizes ``x`` with a range computed from ``x``, with the gradients of the straight-through estimator.

    Shape: ``x`` any, of a floating dtype; result as ``x``, same strides.

    >>> fake_quantize_dynamic(torch.tensor([[0.3, 7.0], [0.3, 0.7]]), (1, -1), -8, 7, symmetric=True)
    tensor([[0.0000, 7.0000],
            [0.3000, 0.7000]])
    """
    result: Tensor
    if torch.compiler.is_compiling() and not is_exporting():
        scale, zero_point = range_of(x, block_size, qmin, qmax, symmetric=symmetric)
        result = FakeQuantize.apply(x, scale, zero_point, block_size, qmin, qmax)
    else:
        if not NATIVE and not torch.compiler.is_compiling():
            refuse_forward_mode("qtk::fake_quantize_dynamic", x)
        result, _, _ = _OP(x, block_size, qmin, qmax, symmetric)
    return result


def range_of(
    x: Tensor, block_size: Sequence[int], qmin: float, qmax: float, *, symmetric: bool
) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point of the range of ``x``, without gradient; in plain aten while compiling.

    Shape: ``x`` any; results float32 and int32, of as many axes, no zero point if symmetric.
    """
    shape = dynamic.scale_shape(x.shape, block_size)
    if not x.numel():
        low = high = torch.zeros(shape, device=x.device)
    elif torch.compiler.is_compiling():
        return written_out_range(x.detach(), block_size, qmin, qmax, symmetric=symmetric)
    else:
        low, high = min_max(x.detach(), block_size)
    return dynamic.dynamic_range(low.reshape(shape), high.reshape(shape), qmin, qmax, symmetric=symmetric)


def written_out_range(
    x: Tensor, block_size: Sequence[int], qmin: float, qmax: float, *, symmetric: bool
) -> tuple[Tensor, Tensor | None]:
    """``range_of`` in plain aten, of a tensor that is not empty."""
    shape = dynamic.scale_shape(x.shape, block_size)
    split, inside = split_shape(x.shape, block_size)
    blocks = x.to(torch.float32).reshape(split)
    low, high = (blocks.amin(inside), blocks.amax(inside)) if inside else (blocks, blocks)
    return dynamic.dynamic_range(low.reshape(shape), high.reshape(shape), qmin, qmax, symmetric=symmetric)
