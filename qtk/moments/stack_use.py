"""How an op multiplies its input with the matrices of one weight: experts, heads, einsum, factors moved beforehand.

Each matrix of the weight has rows of its own, which the op multiplies with it. Where they are is found by running
the ops that move the weight (a transposition, a selection by index) once more, on the index of each element's matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from string import ascii_letters
from typing import Any

import torch
from torch import Tensor, fx

from qtk.graph.evaluate import evaluate_node
from qtk.graph.flow import Flow, maker
from qtk.graph.sites import Port
from qtk.moments.matrix_rows import MatrixRows
from qtk.numerics.matrix_axes import MatrixAxes
from qtk.operators.lookup import op_name, row_of
from qtk.operators.op_row import OpRow, Product
from qtk.operators.targets import aten_name
from qtk.torch_private import length_hint

IN_PLACE = "identity"
"""The kind of ops that keep every element where it is."""

MOVES = frozenset((
    "reshape", "squeeze", "transpose", "expand", IN_PLACE, "getitem",
    "slice", "select", "narrow", "split", "split_with_sizes", "chunk", "unbind", "tensor_split",
    "index", "index_select",
))
"""Kinds and names of the ops that may stand between a weight and its product: outputs and columns stay whole."""

ELLIPSIS = "..."

Read = Callable[[fx.Node], Any]
"""A function from a node to its value."""


class NotALayer(Exception):  # noqa: N818  it is a reason
    """The reason why a weight does not belong to a ``WeightedLayer``."""


@dataclass(frozen=True, slots=True, eq=False)
class StackUse:
    """One product of an input with matrices of a weight.

    Args:
        op: the product.
        data: the value that is multiplied.
        root: the quantized weight, before it is moved.
        moves: the ops that move it, in order.
        axes: of the weight.
        terms: of an einsum, the indices of the data, of the weight and of the result; ``None`` for other ops.
        is_left: whether the weight is the left factor.
    """

    op: fx.Node
    data: fx.Node
    root: fx.Node
    moves: tuple[fx.Node, ...]
    axes: MatrixAxes
    terms: tuple[str, str, str] | None = None
    is_left: bool = False

    @property
    def is_plain(self) -> bool:
        """Says whether the weight is one matrix, multiplied with the last axis of the data."""
        return not self.axes.stack and self.axes.parts == 1 and self.terms is None and not self.is_left

    @property
    def reads(self) -> tuple[fx.Node, ...]:
        """The nodes whose values ``rows`` reads."""
        moved = {self.root, *self.moves}
        others = [read for move in self.moves for read in move.all_input_nodes if read not in moved]
        return tuple(dict.fromkeys((self.data, *others, *filter(None, (self._ends,)))))

    @property
    def is_routed(self) -> bool:
        """Says whether data decide which rows meet which matrix."""
        return len(self.reads) > 1

    def rows(self, read: Read) -> MatrixRows:
        """The rows that meet each matrix, in the values that ``read`` returns."""
        x, matrix = read(self.data), self._matrix(read)
        count = self.axes.count(self.root.meta["val"].shape)
        if self._ends is not None:
            return MatrixRows.of(*_grouped(x, matrix[:, 0, 0], read(self._ends)), count)
        if self.terms is not None:
            return MatrixRows.of(*_contracted(x, matrix, *self.terms), count)
        if self.is_left:
            x = x[None] if x.ndim == 1 else x.mT
        if self.axes.parts > 1:
            return MatrixRows.of(*_of_parts(x, torch.unique(matrix)), count)
        return MatrixRows.of(*_batched(x[None] if x.ndim == 1 else x, matrix[..., 0, 0]), count)

    @property
    def _ends(self) -> fx.Node | None:
        """The ends of the groups of rows of a grouped product."""
        if not _is_grouped(self.op):
            return None
        ends = self.op.args[2] if len(self.op.args) > 2 else self.op.kwargs.get("offs")
        return ends if isinstance(ends, fx.Node) else None

    def _matrix(self, read: Read) -> Tensor:
        """The index of the matrix of each element of the moved weight. Shape: int64, as that."""
        indices = self.axes.indices(tuple(self.root.meta["val"].shape), read(self.data).device)
        values: dict[fx.Node, Any] = {self.root: indices}
        for move in self.moves:
            row = row_of(move)
            if row is not None and row.kind == IN_PLACE:
                values[move] = values[move.all_input_nodes[0]]  # a cast would round large indices
            else:
                values[move] = evaluate_node(move, lambda node: values[node] if node in values else read(node))
        found = values[self.moves[-1] if self.moves else self.root]
        assert isinstance(found, Tensor)
        return found


def stack_use(flow: Flow, row: OpRow, port: Port, *, parts: int = 1) -> StackUse:
    """Says how the op at ``port`` multiplies the weight there.

    Args:
        flow: of the graph.
        row: of the op.
        port: where it reads the weight.
        parts: into how many parts the uses of the weight cut its outputs (``output_parts``).

    Raises: NotALayer if the product cannot be told apart by matrices, outputs and columns of the weight.
    """
    op, shape = port.user, [length_hint(length) for length in port.value.meta["val"].shape]
    root = flow.root(port.value)
    moves = moves_between(flow, port.value, root)
    if row.kind == "einsum":
        data, terms = _einsum(op, port)
        outputs, columns = _axes_of_terms(*terms)
    else:
        data, terms = _factor(op, row, port), None
        channels = row.weight_axes(op, port.value) if row.weight_axes is not None else None
        if channels is None:
            raise NotALayer(f"has no axes of outputs and inputs ({row.kind} with shape {tuple(shape)})")
        outputs, columns = (channels[0],), (channels[1],)
    lengths = [length_hint(length) for length in root.meta["val"].shape]
    at_root = []
    for axis in (*outputs, *columns):
        found = flow.axis_at_root(port.value, axis)
        is_whole = found is not None and (lengths[found] == shape[axis] or (parts > 1 and axis in outputs))
        if found is None or not is_whole or found in at_root:
            raise NotALayer("is rearranged before it is multiplied")
        at_root.append(found)
    rest = tuple(axis for axis in range(len(lengths)) if axis not in at_root)
    if parts > 1 and (rest or len(outputs) > 1 or terms is not None):
        raise NotALayer("is cut along its outputs, and a stack of matrices or multiplied by an einsum")
    axes = MatrixAxes(rest, tuple(at_root[:len(outputs)]), tuple(at_root[len(outputs):]), parts)
    is_left = terms is None and _is_left(op, row, port)
    return StackUse(op, data, root, moves, axes, terms, is_left)


def moves_between(flow: Flow, value: fx.Node, root: fx.Node) -> tuple[fx.Node, ...]:
    """The ops between ``root`` and ``value``. Raises: NotALayer for one after which columns are others."""
    moves: list[fx.Node] = []
    while value is not root:
        for node in dict.fromkeys((value, maker(value))):
            row = row_of(node)
            if row is None or not {row.kind, aten_name(node.target) or ""} & MOVES:
                raise NotALayer(f"goes through {op_name(node)} before it is multiplied")
            moves.append(node)
        carried = flow.carried(value)
        assert carried is not None
        value = carried
    return tuple(reversed(moves))


def _is_grouped(op: fx.Node) -> bool:
    row = row_of(op)
    return row is not None and row.kind == "grouped_matmul"


def _is_left(op: fx.Node, row: OpRow, port: Port) -> bool:
    return row.product is Product.IN_OUT and port.arg == row.weights[0]


def _factor(op: fx.Node, row: OpRow, port: Port) -> fx.Node:
    """The other factor of a matrix product."""
    if _is_grouped(op):
        ends = op.args[2] if len(op.args) > 2 else op.kwargs.get("offs")
        options = [*op.args[3:], *(value for name, value in op.kwargs.items() if name != "offs")]
        ranks = [argument.meta["val"].ndim for argument in op.args[:2] if isinstance(argument, fx.Node)]
        is_plain = port.arg == 1 and ranks == [2, 3] and all(option is None for option in options)
        if not is_plain or not isinstance(ends, fx.Node):
            raise NotALayer("is a factor of a grouped product other than rows times a stack of matrices")
        data = op.args[0]
    elif row.product is Product.IN_OUT:
        first, second = row.weights
        data = op.args[second if port.arg == first else first]
    elif row.product is Product.OUT_IN and op.op == "call_function" and row.data_arg is not None:
        data = op.args[row.data_arg]
    else:
        raise NotALayer("is rearranged before it is multiplied")
    if not isinstance(data, fx.Node) or data is port.value:
        raise NotALayer("is multiplied with itself")
    return data


def _einsum(op: fx.Node, port: Port) -> tuple[fx.Node, tuple[str, str, str]]:
    """The other operand of an einsum of two, and the indices of data, weight and result."""
    equation, operands = op.args[0], op.args[1]
    assert isinstance(equation, str)
    assert isinstance(operands, (list, tuple))
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not arrow or len(terms) != 2 or port.item is None:
        raise NotALayer(f"belongs to an einsum of another form than 'data,weight->result': {equation!r}")
    data = operands[1 - port.item]
    assert isinstance(data, fx.Node)
    of_data, of_weight, of_result = _spelled_out(
        (terms[1 - port.item], terms[port.item], result), (data.meta["val"].ndim, port.value.meta["val"].ndim)
    )
    alone = [index for index in of_weight if index not in of_data + of_result]
    if alone or any(len(set(term)) != len(term) for term in (of_data, of_weight)):
        raise NotALayer(f"is summed by itself in an einsum: {equation!r}")
    return data, (of_data, of_weight, of_result)


def _spelled_out(terms: tuple[str, str, str], ranks: tuple[int, int]) -> tuple[str, str, str]:
    """Terms of data, weight and result with letters for an ellipsis, the last of them the same in all."""
    unused = [letter for letter in ascii_letters if not any(letter in term for term in terms)]
    hidden = [rank - len(term.replace(ELLIPSIS, "")) if ELLIPSIS in term else 0
              for term, rank in zip(terms, ranks, strict=False)]
    letters = "".join(unused[:max(hidden)])
    of_data, of_weight = (term.replace(ELLIPSIS, letters[len(letters) - count:])
                          for term, count in zip(terms, hidden, strict=False))
    return of_data, of_weight, terms[2].replace(ELLIPSIS, letters)


def _axes_of_terms(data: str, weight: str, result: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes of an einsum's weight that count outputs, and the axes that count columns."""
    outputs = tuple(axis for axis, index in enumerate(weight) if index not in data)
    columns = tuple(axis for axis, index in enumerate(weight) if index in data and index not in result)
    if not outputs or not columns:
        raise NotALayer(f"is no factor of a matrix product: {data},{weight}->{result}")
    return outputs, columns


def _grouped(x: Tensor, matrix: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and the matrix of each. Shape: x [rows, in], matrix [groups], ends [groups]."""
    counts = ends.to(torch.int64).diff(prepend=ends.new_zeros(1, dtype=torch.int64))
    owner = matrix.repeat_interleave(counts.to(matrix.device))
    return x[:len(owner)], owner


def _batched(x: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and the matrix of each. Shape: x [..., rows, in], matrix [...]."""
    batch = torch.broadcast_shapes(x.shape[:-2], matrix.shape)  # type: ignore[no-untyped-call]
    owner = matrix.expand(batch).reshape(-1).repeat_interleave(x.shape[-2])
    return x.expand(*batch, *x.shape[-2:]).reshape(-1, x.shape[-1]), owner


def _of_parts(x: Tensor, matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that all of these matrices meet. Shape: x [..., rows, in], matrices [parts that are multiplied]."""
    rows = x.reshape(-1, x.shape[-1])
    return rows.repeat(len(matrices), 1), matrices.repeat_interleave(len(rows))


def _contracted(x: Tensor, matrix: Tensor, data: str, weight: str, result: str) -> tuple[Tensor, Tensor]:
    """Rows of an einsum's data and the matrix of each; indices as in ``StackUse.terms``."""
    summed = [axis for axis, index in enumerate(data) if index not in weight + result]
    if summed:
        x, data = x.sum(summed), "".join(index for index in data if index in weight + result)
    stack = [index for index in weight if index in data and index in result]
    columns = [index for index in weight if index in data and index not in result]
    lengths = dict(zip(weight, matrix.shape, strict=True))
    x = x.expand([lengths.get(index, length) if length == 1 else length
                  for index, length in zip(data, x.shape, strict=True)])
    rows = [index for index in data if index not in weight]
    x = x.permute([data.index(index) for index in (*stack, *rows, *columns)])
    x = x.reshape(*(lengths[index] for index in stack), -1, math.prod(lengths[index] for index in columns))
    others = [axis for axis, index in enumerate(weight) if index not in stack]
    first = matrix.permute([*(weight.index(index) for index in stack), *others])
    owner = first.reshape(*first.shape[:len(stack)], -1)[..., 0]
    return x.reshape(-1, x.shape[-1]), owner.reshape(-1).repeat_interleave(x.shape[-2])
