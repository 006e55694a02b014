"""How the gradient of a learned range is scaled: by LSQ's factor, or not at all."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qtk.ops.eager_function import differentiable


class GradientScale(enum.Enum):
    """What the gradient of a learned range is multiplied by: ``1 / √(N · q_max)``, or 1."""

    LSQ = "lsq"
    NONE = "none"

    def factor(self, shape: Sequence[int], scales: int, qmax: float, *, static: bool) -> float:
        """The factor for a tensor of ``shape`` with so many scales.

        LSQ (arXiv 1902.08153, section 2.2): N counts the weights of a layer, or the features of an activation in
        one sample; here the elements that share a scale. LSQ+ (arXiv 2004.09576) scales the gradient of its
        offset by the same factor.

        Args:
            shape: of the tensor; unless static its first axis counts samples, if it has others.
            scales: how many scales it has.
            qmax: largest code.
            static: whether it is computed from parameters alone.

        >>> GradientScale.LSQ.factor((16, 25), 16, qmax=4, static=True)
        0.1
        >>> GradientScale.LSQ.factor((32, 25), 1, qmax=4, static=False)
        0.1
        """
        if self is not GradientScale.LSQ:
            return 1.0
        sample = shape if static or len(shape) < 2 else shape[1:]
        return 1 / math.sqrt(max(math.prod(sample) / scales, 1.0) * qmax)


def _save_factor(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.factor = inputs[1]


_scale_gradient = differentiable(
    lambda x, factor: x.view_as(x), _save_factor, lambda ctx, grad: (grad * ctx.factor, None)
)


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """``x``, whose gradient is multiplied by ``factor``; detached if that is 0.

    >>> x = torch.ones(2, requires_grad=True)
    >>> scale_gradient(x, 0.5).sum().backward()
    >>> x.grad
    tensor([0.5000, 0.5000])
    """
    if factor == 1 or not torch.is_grad_enabled():
        return x
    if factor == 0:
        return x.detach()
    result: Tensor = _scale_gradient(x, factor)
    return result


def _save_kinds(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    _, *parameters = inputs
    ctx.like = [(parameter.shape, parameter.dtype, parameter.device) for parameter in parameters]


def _zeros(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
    return grad, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)


_with_zero_gradients = differentiable(lambda result, *parameters: result.view_as(result), _save_kinds, _zeros)


def with_zero_gradients(result: Tensor, *parameters: Tensor | None) -> Tensor:
    """``result``, whose backward pass gives ``parameters`` gradients of 0, whatever reaches it.

    >>> held = torch.ones(2, requires_grad=True)
    >>> (with_zero_gradients(torch.ones(3), held) * torch.inf).sum().backward()
    >>> held.grad
    tensor([0., 0.])
    """
    if not torch.is_grad_enabled():
        return result
    zeroed: Tensor = _with_zero_gradients(result, *(each for each in parameters if each is not None))
    return zeroed
