"""``qtk::fake_quantize_with_residual``: fake-quantization in training, which saves one or two bytes a value.

The op returns what ``qtk::fake_quantize`` does and the residual of ``qtk.numerics.residual``, from which the backward
pass computes its gradients, so that the float input need not be kept. A parameter is kept anyway and saved as it is; so
is the result of an op whose own gradient reads it, like a sigmoid. A ReLU reads only signs of its result, which are in
the residual.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qtk.kernels.backends import triton_unavailable
from qtk.numerics import residual as numerics
from qtk.numerics.straight_through import empty_if_unwanted, second_backward
from qtk.torch_private import is_traced, keep_result_as, saves_result

_SPEC = "Tensor scale, Tensor? zero_point, int[] block_size, int qmin, int qmax"

torch.library.define("qtk::fake_quantize_with_residual", f"(Tensor input, {_SPEC}, bool learned) -> (Tensor, Tensor)")
torch.library.define(
    "qtk::fake_quantize_residual_backward",
    f"(Tensor grad, Tensor residual, {_SPEC}, bool wants_scale, bool wants_zero_point) -> (Tensor, Tensor, Tensor)",
)
_OP = torch.ops.qtk.fake_quantize_with_residual.default
_BACKWARD = torch.ops.qtk.fake_quantize_residual_backward.default


def _backward(
    grad: Tensor, residual: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: Sequence[int], qmin: int,
    qmax: int, wants_scale: bool, wants_zero_point: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = numerics.fake_quantize_backward(
        grad, residual, scale, zero_point, block_size, qmin, qmax, wants_scale=wants_scale,
        wants_zero_point=wants_zero_point,
    )
    return empty_if_unwanted(gradients, scale)


def _on_gpu(
    input: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: Sequence[int], qmin: int, qmax: int,
    learned: bool,
) -> tuple[Tensor, Tensor]:
    if triton_unavailable() is not None:
        return numerics.fake_quantize(input, scale, zero_point, block_size, qmin, qmax, learned)
    from qtk.kernels.gpu import fake_quantize as kernels

    return kernels.fake_quantize_with_residual(input, scale, zero_point, block_size, qmin, qmax, learned)


def _backward_on_gpu(
    grad: Tensor, residual: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: Sequence[int], qmin: int,
    qmax: int, wants_scale: bool, wants_zero_point: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    spec = scale, zero_point, block_size, qmin, qmax, wants_scale, wants_zero_point
    if triton_unavailable() is not None:
        return _backward(grad, residual, *spec)
    from qtk.kernels.gpu import fake_quantize as kernels

    return kernels.fake_quantize_residual_backward(grad, residual, *spec)


def _fake(input: Tensor, *spec: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(input), torch.empty_like(input, dtype=torch.int16 if spec[-1] else torch.int8)


def _backward_fake(grad: Tensor, residual: Tensor, scale: Tensor, *spec: Any) -> tuple[Tensor, Tensor, Tensor]:
    of_scale, of_zero = (scale.new_empty(scale.shape if wanted else 0) for wanted in spec[-2:])
    return torch.empty_like(residual, dtype=grad.dtype), of_scale, of_zero


torch.library.impl("qtk::fake_quantize_with_residual", "CompositeExplicitAutograd", numerics.fake_quantize)
torch.library.impl("qtk::fake_quantize_residual_backward", "CompositeExplicitAutograd", _backward)
torch.library.impl("qtk::fake_quantize_with_residual", "CUDA", _on_gpu)
torch.library.impl("qtk::fake_quantize_residual_backward", "CUDA", _backward_on_gpu)
torch.library.register_fake("qtk::fake_quantize_with_residual", _fake)
torch.library.register_fake("qtk::fake_quantize_residual_backward", _backward_fake)


class _Backward(torch.autograd.Function):
    """The backward pass as a function with a derivative; used where a graph of it is asked for."""

    @staticmethod
    def forward(
        ctx: Any, grad: Tensor, residual: Tensor, scale: Tensor, zero_point: Tensor | None, *spec: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(grad, residual, scale, zero_point)
        ctx.spec = spec
        result: tuple[Tensor, Tensor, Tensor] = _BACKWARD(grad, residual, scale, zero_point, *spec)
        return result

    @staticmethod
    def backward(
        ctx: Any, of_dx: Tensor, of_dscale: Tensor, of_dzero_point: Tensor
    ) -> tuple[Tensor | None, ...]:
        grad, residual, scale, zero_point = ctx.saved_tensors
        block_size, qmin, qmax, wants_scale, wants_zero_point = ctx.spec
        if not wants_scale and not wants_zero_point:
            dx, _, _ = _Backward.apply(of_dx, residual, scale, zero_point, block_size, qmin, qmax, False, False)
            return dx, *[None] * 8
        inside, error = numerics.derivative_by_scale(residual, zero_point, block_size, qmin, qmax)
        of_grads = (of_dx, of_dscale if wants_scale else None, of_dzero_point if wants_zero_point else None)
        of_grad, of_scale, of_zero = second_backward(grad, inside, error, scale, block_size, of_grads)
        return of_grad, None, of_scale, None if zero_point is None else of_zero, *[None] * 5


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: Sequence[int], qmin: int, qmax: int,
        learned: bool,
    ) -> Tensor:
        result: Tensor
        result, residual = _OP(x, scale, zero_point, block_size, qmin, qmax, learned)
        if _is_of_relu(x):
            dtype = x.dtype
            keep_result_as(x, lambda: numerics.is_positive(residual, dtype))
        ctx.save_for_backward(residual, scale, zero_point)
        ctx.spec = block_size, qmin, qmax
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        wants_x, wants_scale, wants_zero_point, *_ = ctx.needs_input_grad
        run = _Backward.apply if torch.is_grad_enabled() else _BACKWARD
        dx, of_scale, of_zero = run(grad, *ctx.saved_tensors, *ctx.spec, wants_scale, wants_zero_point)
        return (dx if wants_x else None, of_scale if wants_scale else None, of_zero if wants_zero_point else None,
                *[None] * 4)


def saves_residual(x: Tensor, scale: Tensor, zero_point: Tensor | None) -> bool:
    """Whether a gradient may be asked for and nothing keeps ``x`` until then; tracers see ``qtk::fake_quantize``.

    >>> weight = torch.ones(3, requires_grad=True)
    >>> [saves_residual(x, torch.ones(1), None) for x in (weight, weight * 2, weight.sigmoid(), weight.detach())]
    [False, True, False, False]
    """
    if not torch.is_grad_enabled() or is_traced():
        return False
    if not x.requires_grad:
        return is_learned(scale, zero_point)
    return x.grad_fn is not None and (_is_of_relu(x) or not saves_result(x))


def is_learned(scale: Tensor, zero_point: Tensor | None) -> bool:
    """Whether a gradient of the range may be asked for."""
    return scale.requires_grad or (zero_point is not None and zero_point.requires_grad)


def fake_quantize_with_residual(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: Sequence[int], qmin: int, qmax: int
) -> Tensor:
    """As ``qtk.ops.fake_quantize.fake_quantize``, with the residual instead of ``x`` saved for the backward pass.

    >>> x = torch.tensor([0.3, 9.0], requires_grad=True)
    >>> result = fake_quantize_with_residual(x * 1, torch.tensor([0.25]), None, (), -8, 7)
    >>> result.sum().backward()
    >>> x.grad
    tensor([1., 0.])
    """
    learned = is_learned(scale, zero_point)
    result: Tensor = _Forward.apply(x, scale, zero_point, block_size, qmin, qmax, learned)
    return result


def _is_of_relu(x: Tensor) -> bool:
    return x.grad_fn is not None and x.grad_fn.name() == "ReluBackward0"
