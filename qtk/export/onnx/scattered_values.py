"""Scatters and powers as operators that torch's exporter translates rightly.

torch 2.14 writes ``scatter_reduce`` with "mean" as a scatter without reduction, and more values than indices, of which
ONNX allows none; of ``vander`` it writes a ScatterND whose shapes do not fit. It has no translation of ``index_reduce``
and of ``scatter`` with a reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, fx

from qtk.export.onnx.free_numbers import Number
from qtk.operators.targets import schema_arguments

_ATEN = torch.ops.aten
_REDUCTIONS = {"add": "sum", "multiply": "prod"}


def scatter_reduce(
    x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """As ``aten.scatter_reduce.two``: a mean is the sum over the count, rounded down for integers.

    >>> index, src = torch.tensor([0, 0, 2]), torch.tensor([1.0, 2.0, 5.0])
    >>> scatter_reduce(torch.full((3,), 9.0), 0, index, src, "mean", include_self=False)
    tensor([1.5000, 9.0000, 5.0000])
    """
    if reduce != "mean":
        return _cut(_ATEN.scatter_reduce.two, x, dim, index, src, reduce, include_self=include_self)
    if x.ndim == 0:
        x, index, src = (each.reshape(1) for each in (x, index, src))
        return scatter_reduce(x, 0, index, src, reduce, include_self=include_self).reshape(())
    before, count = x, torch.ones_like(x)
    if not include_self:
        nothing = torch.zeros_like(index, dtype=x.dtype)
        before, count = before.scatter(dim, index, nothing), count.scatter(dim, index, nothing)
    total = before.scatter_add(dim, index, _of_index(src, index))
    count = count.scatter_add(dim, index, torch.ones_like(index, dtype=x.dtype))
    return total / count if x.is_floating_point() else torch.div(total, count, rounding_mode="floor")


def scatter(x: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    """As ``aten.scatter.src``: the values that have no index are left out."""
    return _cut(_ATEN.scatter.src, x, dim, index, src)


def scatter_add(x: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    """As ``aten.scatter_add``: the values that have no index are left out."""
    return _cut(_ATEN.scatter_add.default, x, dim, index, src)


def scatter_with(x: Tensor, dim: int, index: Tensor, src: Tensor, *, reduce: str) -> Tensor:
    """As ``aten.scatter.reduce``.

    >>> scatter_with(torch.ones(2), 0, torch.tensor([0, 0]), torch.tensor([3.0, 5.0]), reduce="multiply")
    tensor([15.,  1.])
    """
    return x.scatter_reduce(dim, index, _of_index(src, index), _REDUCTIONS[reduce])


def scatter_number_with(x: Tensor, dim: int, index: Tensor, value: Number, *, reduce: str) -> Tensor:
    """As ``aten.scatter.value_reduce``."""
    return x.scatter_reduce(dim, index, torch.full_like(index, value, dtype=x.dtype), _REDUCTIONS[reduce])


def index_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """As ``aten.index_reduce``: the scatter of rows.

    >>> index_reduce(torch.zeros(2, 2), 0, torch.tensor([1]), torch.tensor([[3.0, 5.0]]), "mean")
    tensor([[0.0000, 0.0000],
            [1.5000, 2.5000]])
    """
    shape = [1] * source.ndim
    if shape:
        shape[dim] = -1
    return x.scatter_reduce(dim, index.reshape(shape).expand(source.shape), source, reduce, include_self=include_self)


def vander(x: Tensor, N: int | None = None, increasing: bool = False) -> Tensor:
    """As ``aten.vander``: the powers of each value.

    >>> vander(torch.tensor([2, 3]), 3)
    tensor([[4, 2, 1],
            [9, 3, 1]])
    """
    count = x.shape[0] if N is None else N
    rising = torch.arange(count, device=x.device)
    exponents = rising if increasing else count - 1 - rising
    base = x if x.is_floating_point() else x.to(torch.int64)
    return base.unsqueeze(-1).pow(exponents.to(base.dtype))


def _cut(
    op: Callable[..., Tensor], x: Tensor, dim: int, index: Tensor, src: Tensor, *args: object, **options: object
) -> Tensor:
    """The scatter ``op`` of the values that have an index; ``NotImplemented`` where all have one."""
    values = _of_index(src, index)
    return NotImplemented if values is src else op(x, dim, index, values, *args, **options)


def _of_index(src: Tensor, index: Tensor) -> Tensor:
    """The values of ``src`` that ``index`` has places for."""
    for axis in _longer_axes(src, index):
        src = src.narrow(axis, 0, index.shape[axis])
    return src


def _longer_axes(src: Tensor, index: Tensor) -> list[int]:
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # loads sympy

    return [axis for axis, (length, count) in enumerate(zip(src.shape, index.shape, strict=False))
            if not statically_known_true(length == count)]


def is_scattered_wrongly(node: fx.Node) -> bool:
    """Says whether torch's exporter has no translation of a scatter or powers, or a wrong one."""
    if node.target not in SCATTERS:
        return False
    arguments = schema_arguments(node)
    if node.target not in _OF_EQUAL_SIZES or arguments.get("reduce") == "mean":
        return True
    index, src = (arguments[name].meta["val"] for name in ("index", "src"))  # type: ignore[union-attr]
    return bool(_longer_axes(src, index))


_OF_EQUAL_SIZES: Mapping[Callable[..., object], Callable[..., object]] = {
    _ATEN.scatter_reduce.two: scatter_reduce,
    _ATEN.scatter.src: scatter,
    _ATEN.scatter_add.default: scatter_add,
}
"""Operators that torch translates rightly where each value has an index."""

SCATTERS: Mapping[Callable[..., object], Callable[..., object]] = {
    **_OF_EQUAL_SIZES,
    _ATEN.scatter.reduce: scatter_with,
    _ATEN.scatter.value_reduce: scatter_number_with,
    _ATEN.index_reduce.default: index_reduce,
    _ATEN.vander.default: vander,
}
"""Operator → what it is decomposed into."""
