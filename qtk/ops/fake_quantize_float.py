"""``qtk::fake_quantize_float``: the op behind every quantizer to a floating-point format, with its gradient.

Formulas of ``qtk.numerics.minifloat``; ``block_size`` and backends as in ``qtk.ops.fake_quantize``. A format is given
by its exponent bits, its mantissa bits and its largest number. Under ``torch.compile`` it is plain aten.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qtk.core.dtypes import DTYPES, FloatDtype
from qtk.kernels.backends import load_native, triton_unavailable
from qtk.numerics import minifloat
from qtk.numerics.blocks import check_fit
from qtk.numerics.straight_through import second_backward
from qtk.ops.forward_mode import refuse_forward_mode

_SPEC = "Tensor scale, int[] block_size, int exponent_bits, int mantissa_bits, float largest"

load_native()
torch.library.define("qtk::fake_quantize_float", f"(Tensor input, {_SPEC}) -> Tensor")
torch.library.define(
    "qtk::fake_quantize_float_backward",
    f"(Tensor grad, Tensor input, {_SPEC}, bool wants_scale) -> (Tensor, Tensor)",
)


def _forward(
    input: Tensor, scale: Tensor, block_size: Sequence[int], exponent_bits: int, mantissa_bits: int, largest: float
) -> Tensor:
    format = _format(exponent_bits, mantissa_bits, largest)
    return minifloat.fake_quantize(input.detach(), scale.detach(), block_size, format)


def written_out(
    input: Tensor, scale: Tensor, block_size: Sequence[int], exponent_bits: int, mantissa_bits: int, largest: float
) -> Tensor:
    """``qtk::fake_quantize_float`` in plain aten without writes; arguments as the op."""
    format = _format(exponent_bits, mantissa_bits, largest)
    return minifloat.fake_quantized(input, scale, block_size, format).to(input.dtype)


def _backward(
    grad: Tensor, input: Tensor, scale: Tensor, block_size: Sequence[int], exponent_bits: int, mantissa_bits: int,
    largest: float, wants_scale: bool,
) -> tuple[Tensor, Tensor]:
    format = _format(exponent_bits, mantissa_bits, largest)
    dx, dscale = minifloat.fake_quantize_backward(grad.detach(), input.detach(), scale.detach(), block_size, format)
    return dx, dscale if wants_scale else scale.new_empty(0)


@torch.library.impl("qtk::fake_quantize_float", "CUDA")
def _on_gpu(
    input: Tensor, scale: Tensor, block_size: Sequence[int], exponent_bits: int, mantissa_bits: int, largest: float
) -> Tensor:
    if triton_unavailable() is not None:
        return _forward(input, scale, block_size, exponent_bits, mantissa_bits, largest)
    from qtk.kernels.gpu import fake_quantize as kernels

    return kernels.fake_quantize_float(input, scale, block_size, _format(exponent_bits, mantissa_bits, largest))


@torch.library.impl("qtk::fake_quantize_float_backward", "CUDA")
def _backward_on_gpu(
    grad: Tensor, input: Tensor, scale: Tensor, block_size: Sequence[int], exponent_bits: int, mantissa_bits: int,
    largest: float, wants_scale: bool,
) -> tuple[Tensor, Tensor]:
    if triton_unavailable() is not None:
        return _backward(grad, input, scale, block_size, exponent_bits, mantissa_bits, largest, wants_scale)
    from qtk.kernels.gpu import fake_quantize as kernels

    format = _format(exponent_bits, mantissa_bits, largest)
    return kernels.fake_quantize_float_backward(grad, input, scale, block_size, format, wants_scale)


def _backward_fake(grad: Tensor, input: Tensor, scale: Tensor, *spec: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(input, dtype=grad.dtype), scale.new_empty(scale.shape if spec[-1] else 0)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, scale, *ctx.spec = inputs
    ctx.save_for_backward(input, scale)


def _autograd(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    input, scale = ctx.saved_tensors
    wants_x, wants_scale, *_ = ctx.needs_input_grad
    dx, dscale = torch.ops.qtk.fake_quantize_float_backward.default(grad, input, scale, *ctx.spec, wants_scale)
    return dx if wants_x else None, dscale if wants_scale else None, None, None, None, None


def _setup_twice(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    grad, input, scale, *ctx.spec, ctx.wants_scale = inputs
    ctx.save_for_backward(grad, input, scale)


def _autograd_twice(ctx: Any, of_dx: Tensor, of_scale: Tensor) -> tuple[Tensor | None, ...]:
    """Second derivatives: x̂ is linear in x and scale almost everywhere, so only the upstream gradient has one."""
    grad, input, scale = ctx.saved_tensors
    block_size, *numbers = ctx.spec
    if not ctx.wants_scale:
        twice, _ = torch.ops.qtk.fake_quantize_float_backward.default(of_dx, input, scale, *ctx.spec, False)
        return twice, *[None] * 7
    inside, error = minifloat.derivative_by_scale(input, scale, block_size, _format(*numbers))
    of_grad, _, _ = second_backward(grad, inside, error, scale, block_size, (of_dx, of_scale, None))
    return of_grad, *[None] * 7


def _format(exponent_bits: int, mantissa_bits: int, largest: float) -> FloatDtype:
    return FloatDtype("", 1 + exponent_bits + mantissa_bits, True, exponent_bits, mantissa_bits, largest)


torch.library.impl("qtk::fake_quantize_float", "CompositeExplicitAutograd", _forward)
torch.library.impl("qtk::fake_quantize_float_backward", "CompositeExplicitAutograd", _backward)
torch.library.register_fake("qtk::fake_quantize_float", lambda input, *spec: torch.empty_like(input))
torch.library.register_fake("qtk::fake_quantize_float_backward", _backward_fake)
torch.library.register_autograd("qtk::fake_quantize_float", _autograd, setup_context=_setup_context)
torch.library.register_autograd("qtk::fake_quantize_float_backward", _autograd_twice, setup_context=_setup_twice)


class _Decomposed(torch.autograd.Function):
    """Forward and straight-through backward in plain aten, for compilers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, *spec: Any) -> Tensor:
        ctx.save_for_backward(x, scale)
        ctx.spec = spec
        return _forward(x, scale, *spec)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale = ctx.saved_tensors
        block_size, *numbers = ctx.spec
        dx, dscale = minifloat.fake_quantize_backward(grad, x, scale, block_size, _format(*numbers))
        return dx, dscale if ctx.needs_input_grad[1] else None, None, None, None, None


def fake_quantize_float(x: Tensor, scale: Tensor, block_size: Sequence[int], format: str) -> Tensor:
    """Fake-quantizes ``x`` to a minifloat, with the gradients of the straight-through estimator.

    ``format`` is the name of a float dtype in ``qtk.core.dtypes``.

    Shape: ``x`` any, of a floating dtype; ``scale`` float32 in the qparam shape; result as ``x``, same strides.

    Raises: SpecError if the scale does not fit ``x``.

    >>> fake_quantize_float(torch.tensor([0.3, 9.0]), torch.tensor([0.5]), (), "fp4_e2m1")
    tensor([0.2500, 3.0000])
    """
    row = DTYPES[format]
    assert isinstance(row, FloatDtype)
    numbers = row.exponent_bits, row.mantissa_bits, row.largest
    result: Tensor
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        result = _Decomposed.apply(x, scale, block_size, *numbers)
        return result
    refuse_forward_mode("qtk::fake_quantize_float", x, scale)
    try:
        result = torch.ops.qtk.fake_quantize_float.default(x, scale, block_size, *numbers)
    except ValueError:
        check_fit(scale, x.shape, block_size)  # raises a SpecError with the shapes
        raise
    return result
