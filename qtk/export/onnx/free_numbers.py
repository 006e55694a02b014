"""Operators that read a number of a free size: the number as a tensor, or as torch decomposes the operator.

torch's exporter (2.14) holds such numbers in attributes or constants, and fails where one is known at run time only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from qtk.torch_private import decomposition_table, pytree

Number = float | int | bool | torch.SymInt | torch.SymFloat
Decomposition = Callable[..., object]

_ATEN = torch.ops.aten


def by_tensor(op: Decomposition, first: Tensor | Number, second: Tensor | Number) -> Tensor:
    """Computes ``op`` of a tensor and a number, the number a tensor too, both of the dtype of the result.

    >>> by_tensor(torch.remainder, torch.tensor([7, -1]), 4)
    tensor([3, 3])
    """
    dtype = torch.result_type(first, second)
    return op(*(each.to(dtype) if isinstance(each, Tensor) else torch.scalar_tensor(each, dtype=dtype)
                for each in (first, second)))  # type: ignore[return-value]


def scatter_number(x: Tensor, dim: int, index: Tensor, value: Number) -> Tensor:
    """As ``aten.scatter.value``.

    >>> scatter_number(torch.zeros(3), 0, torch.tensor([1]), 5)
    tensor([0., 5., 0.])
    """
    return x.scatter(dim, index, torch.full_like(index, value, dtype=x.dtype))


def repeat_each(
    x: Tensor, repeats: int | torch.SymInt, dim: int | None = None, *, output_size: object = None
) -> Tensor:
    """As ``aten.repeat_interleave.self_int``, of which torch's exporter repeats another axis if the number is free.

    >>> repeat_each(torch.tensor([[1, 2], [3, 4]]), 2, -1)
    tensor([[1, 1, 2, 2],
            [3, 3, 4, 4]])
    """
    values = x.flatten() if dim is None else x
    axis = 0 if dim is None else dim % x.ndim
    sizes = [*values.shape[:axis + 1], repeats, *values.shape[axis + 1:]]
    return values.unsqueeze(axis + 1).expand(sizes).flatten(axis, axis + 1)


def is_free_number(value: object) -> bool:
    """Says whether a value is a number that is known at run time only."""
    if isinstance(value, fx.Node):
        value = value.meta.get("val")
    return isinstance(value, torch.SymInt | torch.SymFloat)


def reads_free_number(node: fx.Node) -> bool:
    """Says whether an operator reads a free number that torch's exporter cannot write."""
    return node.target in FREE_NUMBERS and any(map(is_free_number, pytree.tree_leaves((node.args, node.kwargs))))


def free_number_table(table: Mapping[Decomposition, Any]) -> dict[Decomposition, Decomposition]:
    """Returns the decompositions for free numbers, which fall back to ``table`` where all numbers are fixed."""
    return {op: partial(_decomposed, decomposition, table.get(op)) for op, decomposition in FREE_NUMBERS.items()}


def _decomposed(of_free: Decomposition, of_fixed: Decomposition | None, *args: object, **kwargs: object) -> object:
    if any(map(is_free_number, pytree.tree_leaves((args, kwargs)))):
        return of_free(*args, **kwargs)
    return NotImplemented if of_fixed is None else of_fixed(*args, **kwargs)


_BY_TENSOR: Mapping[Decomposition, Decomposition] = {
    _ATEN.remainder.Scalar: torch.remainder,
    _ATEN.remainder.Scalar_Tensor: torch.remainder,
    _ATEN.fmod.Scalar: torch.fmod,
    _ATEN.floor_divide.default: partial(torch.div, rounding_mode="floor"),
    _ATEN.floor_divide.Scalar: partial(torch.div, rounding_mode="floor"),
    _ATEN.pow.Tensor_Scalar: torch.pow,
    _ATEN.pow.Scalar: torch.pow,
    _ATEN.mul.Tensor: torch.mul,
    **{op: function for function, ops in {
        torch.bitwise_and: (_ATEN.bitwise_and.Scalar, _ATEN.bitwise_and.Scalar_Tensor, _ATEN.__and__.Scalar),
        torch.bitwise_or: (_ATEN.bitwise_or.Scalar, _ATEN.bitwise_or.Scalar_Tensor, _ATEN.__or__.Scalar),
        torch.bitwise_xor: (_ATEN.bitwise_xor.Scalar, _ATEN.bitwise_xor.Scalar_Tensor, _ATEN.__xor__.Scalar),
        torch.bitwise_left_shift: (
            _ATEN.bitwise_left_shift.Tensor_Scalar, _ATEN.bitwise_left_shift.Scalar_Tensor, _ATEN.__lshift__.Scalar),
        torch.bitwise_right_shift: (
            _ATEN.bitwise_right_shift.Tensor_Scalar, _ATEN.bitwise_right_shift.Scalar_Tensor, _ATEN.__rshift__.Scalar),
    }.items() for op in ops},
}
"""Operator of a tensor and a number → the function of two tensors."""

_BY_TORCH = (
    _ATEN.addcdiv.default, _ATEN.addcmul.default, _ATEN.addmm.default, _ATEN.addmv.default, _ATEN.addr.default,
    _ATEN.baddbmm.default, _ATEN.celu.default, _ATEN.elu.default, _ATEN.hardtanh.default, _ATEN.leaky_relu.default,
    _ATEN.roll.default, _ATEN.softplus.default,
)
"""Operators that torch decomposes into such as take a free number."""

FREE_NUMBERS: Mapping[Decomposition, Decomposition] = {
    **{op: partial(by_tensor, function) for op, function in _BY_TENSOR.items()},
    **{op: decomposition_table[op] for op in _BY_TORCH},
    _ATEN.repeat_interleave.self_int: repeat_each,
    _ATEN.scatter.value: scatter_number,
}
"""Operator → what it is decomposed into where it reads a number of a free size."""
