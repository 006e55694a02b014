"""``qtk::fake_quantize_many``: many matrices fake-quantized in one call, each row of each with a scale of its own.

Formula and gradient are those of ``qtk::fake_quantize``; on a GPU all matrices of a dtype take one launch. A weight
with a scale for all of it is a matrix of one row, one with a scale for each output channel or block of its last axis
has as many rows as scales. Ranges get no gradient: those that are learned take ``qtk::fake_quantize``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, TypeAlias

import torch
from torch import Tensor

from qtk.errors import SpecError
from qtk.kernels.backends import triton_unavailable
from qtk.ops.fake_quantize import BACKWARD

Given: TypeAlias = tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor], Sequence[int], Sequence[int]]
"""Matrices, scales, zero points (an empty one: all are 0), least and largest codes."""

ROWS = (1, -1)
_SPEC = "Tensor[] inputs, Tensor[] scales, Tensor[] zero_points, int[] qmins, int[] qmaxs"
torch.library.define("qtk::fake_quantize_many", f"({_SPEC}) -> Tensor[]")
torch.library.define("qtk::fake_quantize_many_backward", f"(Tensor[] grads, {_SPEC}) -> Tensor[]")


def _reference(*given: Any) -> list[Tensor]:
    fake_quantize = torch.ops.qtk.fake_quantize.default
    return [
        fake_quantize(x, scale, _or_none(zero), ROWS, qmin, qmax)
        for x, scale, zero, qmin, qmax in zip(*given, strict=True)
    ]


def _reference_backward(grads: Sequence[Tensor], *given: Any) -> list[Tensor]:
    return [
        BACKWARD(g, x, scale, _or_none(zero), ROWS, qmin, qmax, False, False)[0]
        for g, x, scale, zero, qmin, qmax in zip(grads, *given, strict=True)
    ]


def _or_none(zero_point: Tensor) -> Tensor | None:
    return zero_point if zero_point.numel() else None


def in_launches(given: Given, grads: Sequence[Tensor] | None = None) -> list[Tensor]:
    """The results, or with ``grads`` the gradients: one launch a dtype; what the kernel cannot take, one by one."""
    from qtk.kernels.gpu import fake_quantize_many as kernels

    each = list(zip(*given, strict=True))
    results: dict[int, Tensor] = {}
    together = [
        index for index, (x, scale, zero, _, _) in enumerate(each)
        if kernels.takes(x, scale, zero) and (grads is None or (grads[index].dtype == x.dtype and kernels.takes(
            grads[index], scale, zero)))
    ]
    together.sort(key=lambda index: str(each[index][0].dtype))
    for _, indices in groupby(together, key=lambda index: each[index][0].dtype):
        members = list(indices)
        inputs, scales, zero_points, qmins, qmaxs = zip(*(each[index] for index in members), strict=True)
        own = None if grads is None else [grads[index] for index in members]
        found = kernels.run(inputs, scales, zero_points, qmins, qmaxs, own)
        results |= zip(members, found, strict=True)
    for index, one in enumerate(each):
        if index not in results:
            alone = [[part] for part in one]
            found = _reference(*alone) if grads is None else _reference_backward([grads[index]], *alone)
            results[index] = found[0]
    return [results[index] for index in range(len(each))]


def _on_gpu(*given: Any) -> list[Tensor]:
    return _reference(*given) if triton_unavailable() is not None else in_launches(given)


def _backward_on_gpu(grads: Sequence[Tensor], *given: Any) -> list[Tensor]:
    if triton_unavailable() is not None:
        return _reference_backward(grads, *given)
    return in_launches(given, grads)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    matrices, scales, zero_points, *ctx.codes = inputs
    ctx.save_for_backward(*matrices, *scales, *zero_points)


def _autograd(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    saved, count = ctx.saved_tensors, len(grads)
    found = torch.ops.qtk.fake_quantize_many_backward.default(
        grads, saved[:count], saved[count : 2 * count], saved[2 * count :], *ctx.codes
    )
    return found, [None] * count, [None] * count, None, None


torch.library.impl("qtk::fake_quantize_many", "CompositeExplicitAutograd", _reference)
torch.library.impl("qtk::fake_quantize_many_backward", "CompositeExplicitAutograd", _reference_backward)
torch.library.impl("qtk::fake_quantize_many", "CUDA", _on_gpu)
torch.library.impl("qtk::fake_quantize_many_backward", "CUDA", _backward_on_gpu)
torch.library.register_fake("qtk::fake_quantize_many", lambda inputs, *spec: [torch.empty_like(x) for x in inputs])
torch.library.register_fake(
    "qtk::fake_quantize_many_backward", lambda grads, inputs, *spec: [torch.empty_like(x) for x in inputs]
)
torch.library.register_autograd("qtk::fake_quantize_many", _autograd, setup_context=_setup_context)


def fake_quantize_many(
    inputs: Sequence[Tensor], scales: Sequence[Tensor], zero_points: Sequence[Tensor | None],
    codes: Sequence[tuple[int, int]],
) -> list[Tensor]:
    """Fake-quantizes every matrix; the straight-through gradient goes to the matrices alone.

    Args:
        inputs: the matrices, of floating dtypes.
        scales: float32, one for each row.
        zero_points: int32, one for each row; ``None``: 0.
        codes: least and largest code of each matrix.

    Shape: ``inputs`` and results [rows, columns] each; ``scales`` and ``zero_points`` [rows].

    Raises: SpecError if there are not as many of each, or scales do not fit the rows.

    >>> one, other = torch.tensor([[0.3, 9.0]]), torch.tensor([[0.3], [0.6]])
    >>> fake_quantize_many([one, other], [torch.tensor([0.25]), torch.tensor([1.0, 0.5])], [None] * 2, [(-8, 7)] * 2)
    [tensor([[0.2500, 1.7500]]), tensor([[0.0000],
            [0.5000]])]
    """
    counts = len(inputs), len(scales), len(zero_points), len(codes)
    if len({*counts}) > 1:
        raise SpecError(f"{counts[0]} matrices, {counts[1]} scales, {counts[2]} zero points and {counts[3]} pairs of "
                        "codes; as many of each are needed")
    for index, (x, scale) in enumerate(zip(inputs, scales, strict=True)):
        if x.ndim != 2 or scale.shape != x.shape[:1]:
            raise SpecError(f"scales of shape {tuple(scale.shape)} are not one for each row of matrix {index}, of "
                            f"shape {tuple(x.shape)}")
    if not inputs:
        return []
    qmins, qmaxs = zip(*codes, strict=True)
    none = torch.empty(0, dtype=torch.int32, device=inputs[0].device)
    zeros = [none if zero is None else zero for zero in zero_points]
    found: list[Tensor] = torch.ops.qtk.fake_quantize_many.default(inputs, scales, zeros, qmins, qmaxs)
    return found
