"""``qtk::fake_quantize``: the op behind every quantizer, with its gradient.

The formula is that of ``qtk.numerics.affine``. ``block_size`` is ``[]`` for one scale over the whole tensor, else one
entry an axis: 1 for one index, -1 for the whole axis, n for blocks of n.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qtk.numerics import affine, straight_through

_SPEC = "Tensor scale, Tensor? zero_point, int[] block_size, int qmin, int qmax"

torch.library.define("qtk::fake_quantize", f"(Tensor input, {_SPEC}) -> Tensor")
torch.library.define(
    "qtk::fake_quantize_backward",
    f"(Tensor grad, Tensor input, {_SPEC}, bool wants_scale, bool wants_zero_point) -> (Tensor, Tensor, Tensor)",
)


@torch.library.impl("qtk::fake_quantize", "CompositeExplicitAutograd")
def _forward(
    input: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: Sequence[int], qmin: int, qmax: int
) -> Tensor:
    return affine.fake_quantize(input, scale, zero_point, block_size, qmin, qmax)


@torch.library.register_fake("qtk::fake_quantize")  # type: ignore[untyped-decorator]
def _forward_fake(input: Tensor, *spec: object) -> Tensor:
    return torch.empty_like(input)


@torch.library.impl("qtk::fake_quantize_backward", "CompositeExplicitAutograd")
def _backward(
    grad: Tensor, input: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: Sequence[int], qmin: int,
    qmax: int, wants_scale: bool, wants_zero_point: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dscale, dzero_point = straight_through.fake_quantize_backward(
        grad, input, scale, zero_point, block_size, qmin, qmax, wants_scale=wants_scale,
        wants_zero_point=wants_zero_point,
    )
    nothing = scale.new_empty(0)  # an op cannot return None
    return dx, nothing if dscale is None else dscale, nothing.clone() if dzero_point is None else dzero_point


@torch.library.register_fake("qtk::fake_quantize_backward")  # type: ignore[untyped-decorator]
def _backward_fake(
    grad: Tensor, input: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: Sequence[int], qmin: int,
    qmax: int, wants_scale: bool, wants_zero_point: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dscale = scale.new_empty(scale.shape if wants_scale else 0)
    return torch.empty_like(grad), dscale, scale.new_empty(scale.shape if wants_zero_point else 0)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, scale, zero_point, *ctx.spec = inputs
    ctx.save_for_backward(input, scale, zero_point)


def _autograd(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    input, scale, zero_point = ctx.saved_tensors
    _, wants_scale, wants_zero_point, *_ = ctx.needs_input_grad
    dx, dscale, dzero_point = torch.ops.qtk.fake_quantize_backward(
        grad, input, scale, zero_point, *ctx.spec, wants_scale, wants_zero_point
    )
    return dx, dscale if wants_scale else None, dzero_point if wants_zero_point else None, None, None, None


torch.library.register_autograd("qtk::fake_quantize", _autograd, setup_context=_setup_context)


def fake_quantize(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: Sequence[int], qmin: int, qmax: int
) -> Tensor:
    """``x`` rounded to the grid of its codes, with straight-through gradients.

    Shape: ``x`` any, float32, float16 or bfloat16; ``scale`` float32 and ``zero_point`` int32 (float32 while it is
    learned) in the qparam shape; result as ``x``, same strides.
    """
    result: Tensor = torch.ops.qtk.fake_quantize(x, scale, zero_point, block_size, qmin, qmax)
    return result
