"""``qtk::fake_quantize_many``: ``qtk::fake_quantize`` of a list of tensors, each with its own range and codes.

Values and gradients are bit for bit those of ``qtk::fake_quantize``. On a GPU one launch serves all tensors that
compile alike, forward and backward: a launch costs as much as the work on a small tensor. Elsewhere it is a loop.
In the ops the block sizes are one list, of one entry for each axis of each tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from qtk.kernels.backends import shares_launches
from qtk.numerics.blocks import check_range, flat_sizes, split_sizes
from qtk.ops.fake_quantize import BACKWARD, backward_with_derivative, fake_quantize
from qtk.ops.forward_mode import refuse_forward_mode

Lists: TypeAlias = tuple[list[Tensor], list[Tensor], list[Tensor]]

_SPEC = "Tensor[] scales, Tensor?[] zero_points, int[] block_sizes, int[] qmins, int[] qmaxs"

torch.library.define("qtk::fake_quantize_many", f"(Tensor[] inputs, {_SPEC}) -> Tensor[]")
torch.library.define(
    "qtk::fake_quantize_many_backward",
    f"(Tensor[] grads, Tensor[] inputs, {_SPEC}, bool[] wants_scales, bool[] wants_zero_points) -> "
    "(Tensor[], Tensor[], Tensor[])",
)
_ONE = torch.ops.qtk.fake_quantize.default
_OP = torch.ops.qtk.fake_quantize_many.default
_BACKWARD = torch.ops.qtk.fake_quantize_many_backward.default


def _calls(inputs: Sequence[Tensor], *spec: Any) -> Iterator[tuple[Any, ...]]:
    """The arguments of ``qtk::fake_quantize`` for each tensor."""
    scales, zero_points, block_sizes, *rest = spec
    return zip(inputs, scales, zero_points, split_sizes(inputs, block_sizes), *rest, strict=True)


def _loop(inputs: Sequence[Tensor], *spec: Any) -> list[Tensor]:
    return [_ONE(*call) for call in _calls(inputs, *spec)]


def _backward_loop(grads: Sequence[Tensor], inputs: Sequence[Tensor], *spec: Any) -> Lists:
    calls = zip(grads, _calls(inputs, *spec), strict=True)
    return _columns([BACKWARD(grad, *call) for grad, call in calls])


def _columns(gradients: Sequence[Sequence[Tensor]]) -> Lists:
    of_inputs, of_scales, of_zero_points = ([each[place] for each in gradients] for place in range(3))
    return of_inputs, of_scales, of_zero_points


def _on_gpu(inputs: Sequence[Tensor], *spec: Any) -> list[Tensor]:
    if not shares_launches(inputs[0].device):
        return _loop(inputs, *spec)
    from qtk.kernels.gpu import fake_quantize_many as kernels

    scales, zero_points, block_sizes, *codes = spec
    return kernels.fake_quantize_many(inputs, scales, zero_points, list(split_sizes(inputs, block_sizes)), *codes)


def _backward_on_gpu(grads: Sequence[Tensor], inputs: Sequence[Tensor], *spec: Any) -> Lists:
    if not shares_launches(inputs[0].device):
        return _backward_loop(grads, inputs, *spec)
    from qtk.kernels.gpu import fake_quantize_many as kernels

    scales, zero_points, block_sizes, *rest = spec
    return _columns(kernels.fake_quantize_many_backward(
        grads, inputs, scales, zero_points, list(split_sizes(inputs, block_sizes)), *rest
    ))


def _fake(inputs: Sequence[Tensor], *spec: Any) -> list[Tensor]:
    return [torch.empty_like(x) for x in inputs]


def _backward_fake(grads: Sequence[Tensor], inputs: Sequence[Tensor], *spec: Any) -> Lists:
    scales, *_, wants_scales, wants_zero_points = spec
    of_inputs = [torch.empty_like(x, dtype=grad.dtype) for x, grad in zip(inputs, grads, strict=True)]
    of_scales, of_zero_points = (
        [scale.new_empty(scale.shape if wanted else 0) for scale, wanted in zip(scales, wants, strict=True)]
        for wants in (wants_scales, wants_zero_points)
    )
    return of_inputs, of_scales, of_zero_points


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    xs, scales, zero_points, *ctx.spec = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*xs, *scales, *zero_points)


def _autograd(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[list[Tensor | None] | None, ...]:
    """A tensor whose result no loss depends on has no gradient, not even one of 0."""
    count, saved = len(grads), ctx.saved_tensors
    xs, scales, zero_points = (saved[place * count : (place + 1) * count] for place in range(3))
    calls = list(_calls(xs, scales, zero_points, *ctx.spec))
    listed = [isinstance(flags, list) for flags in ctx.needs_input_grad[:3]]  # nothing but ``None`` has one flag
    flags = [each if is_list else [each] * count for each, is_list in zip(ctx.needs_input_grad, listed, strict=False)]
    needed = list(zip(*flags, strict=True))
    reached = [place for place, grad in enumerate(grads) if grad is not None]
    gradients = _gradients([grads[place] for place in reached], [calls[place] for place in reached],
                           [needed[place][1:] for place in reached])
    results: list[list[Tensor | None]] = [[None] * count for _ in range(3)]
    for place, row in zip(reached, gradients, strict=True):
        for column, gradient, wanted in zip(results, row, needed[place], strict=True):
            column[place] = gradient if wanted else None
    return *(column if is_list else None for column, is_list in zip(results, listed, strict=True)), None, None, None


def _gradients(
    grads: Sequence[Tensor | None], calls: Sequence[tuple[Any, ...]], wants: Sequence[tuple[bool, ...]]
) -> Iterator[tuple[Tensor, ...]]:
    """The gradients of each call of ``qtk::fake_quantize``; ``wants``: whether those of scale and zero point."""
    if torch.is_grad_enabled():  # the backward pass is to have derivatives itself
        for grad, call, want in zip(grads, calls, wants, strict=True):
            yield backward_with_derivative(grad, *call, *want)
    elif grads:
        xs, scales, zero_points, block_sizes, qmins, qmaxs = (list(column) for column in zip(*calls, strict=True))
        wants_scales, wants_zero_points = (list(column) for column in zip(*wants, strict=True))
        yield from zip(*_BACKWARD(
            grads, xs, scales, zero_points, flat_sizes(xs, block_sizes), qmins, qmaxs, wants_scales, wants_zero_points
        ), strict=True)


torch.library.impl("qtk::fake_quantize_many", "CompositeExplicitAutograd", _loop)
torch.library.impl("qtk::fake_quantize_many_backward", "CompositeExplicitAutograd", _backward_loop)
torch.library.impl("qtk::fake_quantize_many", "CUDA", _on_gpu)
torch.library.impl("qtk::fake_quantize_many_backward", "CUDA", _backward_on_gpu)
torch.library.register_fake("qtk::fake_quantize_many", _fake)
torch.library.register_fake("qtk::fake_quantize_many_backward", _backward_fake)
torch.library.register_autograd("qtk::fake_quantize_many", _autograd, setup_context=_setup_context)


def fake_quantize_many(
    xs: Sequence[Tensor], scales: Sequence[Tensor], zero_points: Sequence[Tensor | None],
    block_sizes: Sequence[Sequence[int]], qmins: Sequence[int], qmaxs: Sequence[int],
) -> list[Tensor]:
    """Fake-quantizes every tensor, with the gradients of the straight-through estimator.

    All arguments have one entry for each tensor; as those of ``qtk.ops.fake_quantize.fake_quantize``, and so are the
    results and their gradients, bit for bit. All gradients are computed when that of the last result is there.

    Raises: SpecError if scale or zero point do not fit their tensor.

    >>> xs = [torch.tensor([0.3, 9.0]), torch.tensor([[0.6], [0.9]])]
    >>> fake_quantize_many(xs, [torch.tensor([0.25]), torch.tensor([0.5, 1.0])], [None, None], [(), (1, -1)],
    ...                    [-8, -2], [7, 1])
    [tensor([0.2500, 1.7500]), tensor([[0.5000],
            [1.0000]])]
    """
    if torch.compiler.is_compiling():
        return [fake_quantize(*call) for call in zip(xs, scales, zero_points, block_sizes, qmins, qmaxs, strict=True)]
    refuse_forward_mode("qtk::fake_quantize_many", *xs, *scales, *zero_points)
    for call in zip(xs, scales, zero_points, block_sizes, strict=True):
        check_range(call[1], call[2], call[0].shape, call[3])
    lists = list(xs), list(scales), list(zero_points), flat_sizes(xs, block_sizes), list(qmins), list(qmaxs)
    results: list[Tensor] = _OP(*lists)
    return results
