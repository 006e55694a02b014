"""Gradients of fake-quantize operators by the straight-through estimator, differentiable once more.

An operator takes ``(x, scale, zero_point, *spec)``, or ``(x, scale, *spec)`` without zero points; its backward operator
takes ``(grad, x, scale, zero_point, *spec, wants_scale, wants_zero_point)``. Formulas of
``qtk.numerics.straight_through``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qtk.numerics.straight_through import second_backward
from qtk.ops.registration import Gradient

_NOTHING = (None,) * 16
"""Gradients of arguments that have none."""


class StraightThrough:
    """The gradients of one operator.

    Args:
        derivative_by_scale: of an operator's arguments, as ``qtk.numerics.straight_through.derivative_by_scale``.
        backward: the backward operator, as it is called for second derivatives.
        has_zero_point: whether the operator takes zero points.
    """

    def __init__(
        self, derivative_by_scale: Callable[..., tuple[Tensor, Tensor]], backward: Callable[..., Any],
        *, has_zero_point: bool = True,
    ) -> None:
        self._derivative_by_scale = derivative_by_scale
        self._backward = backward
        self._ranges = 2 if has_zero_point else 1
        self._tensors = 1 + self._ranges

    def fake(self, grad: Tensor, x: Tensor, scale: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        """The fake of the backward operator."""
        wanted = rest[-self._ranges :]
        return torch.empty_like(x, dtype=grad.dtype), *(scale.new_empty(scale.shape if each else 0) for each in wanted)

    def once(self, backward: Callable[..., Any]) -> Gradient:
        """The gradient of the operator, which ``backward`` computes."""
        return Gradient(self._save, functools.partial(self.gradients, backward))

    @property
    def twice(self) -> Gradient:
        """The gradient of the backward operator: second derivatives."""
        return Gradient(self._save_backward, self._second)

    def gradients(self, backward: Callable[..., Any], ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """A gradient for each argument of a call, ``None`` if it is not needed."""
        needed = ctx.needs_input_grad
        found = backward(grad, *ctx.saved_tensors, *ctx.spec, *needed[1 : self._tensors])
        of_x, of_scale = found[0] if needed[0] else None, found[1] if needed[1] else None
        if self._ranges == 1:  # written out: it runs in every backward pass
            return of_x, of_scale, *_NOTHING[2 : len(needed)]
        return of_x, of_scale, found[2] if needed[2] else None, *_NOTHING[3 : len(needed)]

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[: self._tensors])
        ctx.spec = inputs[self._tensors :]

    def _save_backward(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[: 1 + self._tensors])
        ctx.spec, ctx.wants = inputs[1 + self._tensors : -self._ranges], inputs[-self._ranges :]

    def _second(self, ctx: Any, of_dx: Tensor, *of_range: Tensor | None) -> tuple[Tensor | None, ...]:
        """If only ``x`` is trained, dx is linear in the upstream gradient and depends on nothing else."""
        grad, x, scale, *zero_point = ctx.saved_tensors
        rest = [None] * (len(ctx.spec) + self._ranges)
        if not any(ctx.wants):
            dx = self._backward(of_dx, x, scale, *zero_point, *ctx.spec, *ctx.wants)[0]
            return dx, *[None] * self._tensors, *rest
        inside, error = self._derivative_by_scale(x, scale, *zero_point, *ctx.spec)
        of_scale, *of_zero = (each if want else None for each, want in zip(of_range, ctx.wants, strict=True))
        of_grads = of_dx, of_scale, of_zero[0] if of_zero else None
        of_grad, of_scale, of_zero_point = second_backward(grad, inside, error, scale, ctx.spec[0], of_grads)
        if not zero_point:  # x̂ is linear in x and scale
            return of_grad, None, None, *rest
        return of_grad, None, of_scale, None if zero_point[0] is None else of_zero_point, *rest
