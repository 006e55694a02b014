"""``qtk::fake_quantize_with_residual``: fake-quantization in training, which saves one or two bytes a value.

The op returns what ``qtk::fake_quantize`` does and the residual of ``qtk.numerics.residual``, from which the backward
pass computes its gradients, so that the float input need not be kept. A parameter is kept anyway and saved as it is; so
is the result of an op whose own gradient reads it, like a sigmoid. A ReLU reads only signs of its result, which are in
the residual.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from qtk.numerics import residual as numerics
from qtk.ops.eager_function import differentiable
from qtk.ops.registration import Kernel, register
from qtk.ops.straight_through import StraightThrough
from qtk.torch_private import is_traced, keep_result_as, saves_result

_SPEC = "Tensor scale, Tensor? zero_point, int[] block_size, int qmin, int qmax"
_ESTIMATOR = StraightThrough(
    lambda residual, scale, *spec: numerics.derivative_by_scale(residual, *spec),
    lambda *given: _twice_differentiable(*given),
)


def _fake(input: Tensor, *spec: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(input), torch.empty_like(input, dtype=torch.int16 if spec[-1] else torch.int8)


_OP = register(
    f"fake_quantize_with_residual(Tensor input, {_SPEC}, bool learned) -> (Tensor, Tensor)",
    numerics.fake_quantize, _fake, gpu=Kernel("fake_quantize", "fake_quantize_with_residual"),
)
_BACKWARD = register(
    f"fake_quantize_residual_backward(Tensor grad, Tensor residual, {_SPEC}, bool wants_scale, bool wants_zero_point) "
    "-> (Tensor, Tensor, Tensor)",
    numerics.fake_quantize_backward, _ESTIMATOR.fake,
    gpu=Kernel("fake_quantize", "fake_quantize_residual_backward"),
)
_twice_differentiable: Callable[..., Any] = differentiable(_BACKWARD, *_ESTIMATOR.twice)
"""The backward pass as a function with a derivative; used where a graph of it is asked for."""


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
        return _ESTIMATOR.gradients(_twice_differentiable if torch.is_grad_enabled() else _BACKWARD, ctx, grad)


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
