"""``qtk::fake_quantize``: the op behind every quantizer, with its gradient.

The formula is that of ``qtk.numerics.affine``, the gradient that of ``qtk.numerics.straight_through``.
``block_size`` is ``[]`` for one scale over the whole tensor, else one entry an axis: 1 for one index, -1 for the whole
axis, n for blocks of n. A faster backend registers itself for its device key on ``qtk::fake_quantize`` and
``qtk::fake_quantize_backward``. The C++ library, where it is built, also defines the schemas and the autograd of all
devices, at a tenth of the overhead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from qtk.kernels.backends import load_native, triton_unavailable
from qtk.numerics import affine, straight_through
from qtk.numerics.blocks import check_range
from qtk.ops.decomposed import FakeQuantize
from qtk.ops.eager_function import applied
from qtk.ops.fake_quantize_residual import fake_quantize_with_residual, is_learned, saves_residual
from qtk.ops.forward_mode import refuse_forward_mode
from qtk.torch_private import below_autograd, is_traced

_NATIVE = load_native() is None
_SPEC = "Tensor scale, Tensor? zero_point, int[] block_size, int qmin, int qmax"

if not _NATIVE:
    torch.library.define("qtk::fake_quantize", f"(Tensor input, {_SPEC}) -> Tensor")
    torch.library.define(
        "qtk::fake_quantize_backward",
        f"(Tensor grad, Tensor input, {_SPEC}, bool wants_scale, bool wants_zero_point) -> (Tensor, Tensor, Tensor)",
    )
torch.library.impl("qtk::fake_quantize", "CompositeExplicitAutograd", affine.fake_quantize)
torch.library.register_fake("qtk::fake_quantize", lambda input, *spec: torch.empty_like(input))
_OP = torch.ops.qtk.fake_quantize.default
BACKWARD = torch.ops.qtk.fake_quantize_backward.default


def _backward(
    grad: Tensor, input: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: Sequence[int], qmin: int,
    qmax: int, wants_scale: bool, wants_zero_point: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = straight_through.fake_quantize_backward(
        grad, input, scale, zero_point, block_size, qmin, qmax, wants_scale=wants_scale,
        wants_zero_point=wants_zero_point,
    )
    return straight_through.empty_if_unwanted(gradients, scale)


torch.library.impl("qtk::fake_quantize_backward", "CompositeExplicitAutograd", _backward)


@torch.library.impl("qtk::fake_quantize", "CUDA")
def _on_gpu(
    input: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: Sequence[int], qmin: int, qmax: int
) -> Tensor:
    if triton_unavailable() is not None:
        return affine.fake_quantize(input, scale, zero_point, block_size, qmin, qmax)
    from qtk.kernels.gpu import fake_quantize as kernels

    return kernels.fake_quantize(input, scale, zero_point, block_size, qmin, qmax)


@torch.library.impl("qtk::fake_quantize_backward", "CUDA")
def _backward_on_gpu(
    grad: Tensor, input: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: Sequence[int], qmin: int,
    qmax: int, wants_scale: bool, wants_zero_point: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    spec = scale, zero_point, block_size, qmin, qmax, wants_scale, wants_zero_point
    if triton_unavailable() is not None:
        return _backward(grad, input, *spec)
    from qtk.kernels.gpu import fake_quantize as kernels

    return kernels.fake_quantize_backward(grad, input, *spec)


def _backward_fake(
    grad: Tensor, input: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: Sequence[int], qmin: int,
    qmax: int, wants_scale: bool, wants_zero_point: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dscale = scale.new_empty(scale.shape if wants_scale else 0)
    dzero_point = scale.new_empty(scale.shape if wants_zero_point else 0)
    return torch.empty_like(input, dtype=grad.dtype), dscale, dzero_point


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, scale, zero_point, *ctx.spec = inputs
    ctx.save_for_backward(input, scale, zero_point)


def _autograd(ctx: Any, grad: Tensor, backward: Callable[..., Any] = BACKWARD) -> tuple[Tensor | None, ...]:
    input, scale, zero_point = ctx.saved_tensors
    wants_x, wants_scale, wants_zero_point, *_ = ctx.needs_input_grad
    dx, dscale, dzero_point = backward(grad, input, scale, zero_point, *ctx.spec, wants_scale, wants_zero_point)
    return (
        dx if wants_x else None, dscale if wants_scale else None, dzero_point if wants_zero_point else None,
        None, None, None,
    )


def _setup_twice(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    grad, input, scale, zero_point, *ctx.spec = inputs
    ctx.save_for_backward(grad, input, scale, zero_point)


def _autograd_twice(
    ctx: Any, of_dx: Tensor, of_dscale: Tensor | None, of_dzero_point: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Second derivatives; if only ``x`` is trained, dx is linear in the upstream gradient and in nothing else."""
    grad, input, scale, zero_point = ctx.saved_tensors
    *spec, wants_scale, wants_zero_point = ctx.spec
    if not wants_scale and not wants_zero_point:
        return BACKWARD(of_dx, input, scale, zero_point, *spec, False, False)[0], *[None] * 8
    inside, error = straight_through.derivative_by_scale(input, scale, zero_point, *spec)
    of_grad, of_scale, of_zero = straight_through.second_backward(
        grad, inside, error, scale, spec[0],
        (of_dx, of_dscale if wants_scale else None, of_dzero_point if wants_zero_point else None),
    )
    return of_grad, None, of_scale, None if zero_point is None else of_zero, *[None] * 5


class _LearnedBackward(torch.autograd.Function):

    generate_vmap_rule = True
    forward = staticmethod(lambda *arguments: BACKWARD(*arguments))
    setup_context = staticmethod(_setup_twice)
    backward = staticmethod(_autograd_twice)


backward_with_derivative = applied(_LearnedBackward)
"""The backward pass as a function with a derivative, for learned ranges too."""


def _autograd_of_learned(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Without a derivative where nobody can ask for one."""
    return _autograd(ctx, grad, backward_with_derivative if torch.is_grad_enabled() or is_traced() else BACKWARD)


class _Learned(torch.autograd.Function):
    """The op for ranges that are learned: unlike that of the C++ library, this one has second derivatives."""

    generate_vmap_rule = True
    forward = staticmethod(lambda *arguments: _OP(*arguments))
    setup_context = staticmethod(_setup_context)
    backward = staticmethod(_autograd_of_learned)


_learned = applied(_Learned)


torch.library.register_fake("qtk::fake_quantize_backward", _backward_fake)
if not _NATIVE:
    torch.library.register_autograd("qtk::fake_quantize", _autograd, setup_context=_setup_context)
    torch.library.register_autograd("qtk::fake_quantize_backward", _autograd_twice, setup_context=_setup_twice)


def fake_quantize(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: Sequence[int], qmin: int, qmax: int
) -> Tensor:
    """Fake-quantizes ``x``, with the gradients of the straight-through estimator.

    Shape: ``x`` any, of a floating dtype; ``scale`` float32 and ``zero_point`` int32, or float32 and rounded to a
    code, in the qparam shape; result as ``x``, same strides.

    Raises: SpecError if scale or zero point do not fit ``x``.

    >>> fake_quantize(torch.tensor([0.3, 9.0]), torch.tensor([0.25]), None, (), -8, 7)
    tensor([0.2500, 1.7500])
    """
    result: Tensor
    # torch 2.11 says that it exports while it compiles, so that the op stays: its inlined gradient would be wrong there
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        result = FakeQuantize.apply(x, scale, zero_point, block_size, qmin, qmax)
        return result
    is_compiling = torch.compiler.is_compiling()
    if not _NATIVE and not is_compiling:
        refuse_forward_mode("qtk::fake_quantize", x, scale, zero_point)
    try:
        if not is_compiling and saves_residual(x, scale, zero_point):
            return fake_quantize_with_residual(x, scale, zero_point, block_size, qmin, qmax)
        if not is_compiling and torch.is_grad_enabled() and is_learned(scale, zero_point):
            result = _learned(x, scale, zero_point, block_size, qmin, qmax)
            return result
        if _NATIVE or is_compiling or (torch.is_grad_enabled() and x.requires_grad):
            result = _OP(x, scale, zero_point, block_size, qmin, qmax)
            return result
        with below_autograd():  # the op's autograd layer is Python: as slow as the math of a small x
            result = _OP(x, scale, zero_point, block_size, qmin, qmax)
        return result
    except ValueError:
        check_range(scale, zero_point, x.shape, block_size)  # raises a SpecError with the shapes
        raise
