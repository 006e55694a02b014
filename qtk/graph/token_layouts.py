"""Follows the tokens of a batch through a graph: where the axes [samples, tokens] of its inputs are in each value."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from torch import Tensor, fx

from qtk.graph.captured_graph import CapturedGraph
from qtk.graph.graphs import nested_graphs
from qtk.graph.insert import quantizer_called, quantizer_nodes
from qtk.nn.attention import Attention
from qtk.nn.recurrent import Recurrent
from qtk.numerics.token_layout import Count, Factor, TokenLayout
from qtk.operators.lookup import op_name, row_of
from qtk.operators.op_row import OpRow, Tokens
from qtk.operators.targets import aten_name, called_module, packed_call, schema_arguments
from qtk.ops.pack_padded import pack_padded
from qtk.quantizers.quantizer import Quantizer
from qtk.torch_private import has_length_hint, length_hint

Followed: TypeAlias = TokenLayout | str | None
"""The layout of a value; the op behind which its tokens could not be followed; ``None`` if it has none."""


class TokenLayouts:
    """The layouts of the values of one graph, and of the graphs inside its attentions.

    Args:
        graph: a captured graph, with or without quantizers.
        inputs: placeholder → layout, of the inputs that have tokens.
    """

    def __init__(self, graph: CapturedGraph, inputs: Mapping[fx.Node, TokenLayout]) -> None:
        self.calls: list[tuple[Quantizer, Followed]] = []
        """The calls of quantizers in order; calls in a module that is run as a whole are named once."""
        self._lost: dict[fx.Node, str] = {}
        self._layouts: dict[fx.Node, TokenLayout] = dict(inputs)
        for node in graph.graph.nodes:
            if node.op in ("call_function", "call_module"):
                self._visit(node)

    def __getitem__(self, node: fx.Node) -> Followed:
        return self._layouts.get(node, self._lost.get(node))

    def _visit(self, node: fx.Node) -> None:
        quantizer = quantizer_called(node)
        if quantizer is None and nested_graphs(node):
            self._enter(node)
        layout = self._result(node)
        if layout is not None and layout.is_complete:
            self._layouts[node] = layout
        if quantizer is not None:
            self.calls.append((quantizer, self[node]))

    def _enter(self, node: fx.Node) -> None:
        """Follows the tokens into an attention; other modules are run as a whole."""
        module = called_module(node)
        if isinstance(module, Attention) and isinstance(core := module.core, CapturedGraph):
            inputs = {
                placeholder: self._layouts[argument]
                for placeholder, argument in zip(core.graph.find_nodes(op="placeholder"), node.args, strict=False)
                if isinstance(argument, fx.Node) and argument in self._layouts
            }
            inside = TokenLayouts(core, inputs)
            self.calls += inside.calls
            self._layouts |= inside._layouts
            self._lost |= inside._lost
            return
        lost = None if packed_call(node) else op_name(node)
        for graph in nested_graphs(node).values():
            self.calls += [(quantizer, lost) for quantizer in quantizer_nodes(graph).values()]
            self._lost |= {} if lost is None else dict.fromkeys(graph.graph.nodes, lost)

    def _result(self, node: fx.Node) -> TokenLayout | None:
        if not _has_values(node) or node.target is pack_padded:  # all elements of a packed value count
            return None
        if aten_name(node.target) == "_pad_packed_sequence":
            self._lost[node] = op_name(node)
            return None
        sources = {source: self._layouts[source] for source in node.all_input_nodes if source in self._layouts}
        if not sources:
            lost = next((self._lost[source] for source in node.all_input_nodes if source in self._lost), None)
            if lost is not None:
                self._lost[node] = lost
            return None
        if not _is_sized(node):
            self._lost[node] = op_name(node)
            return None
        result = _Result(node, sources)
        if result.layout is None and not result.gone:
            self._lost[node] = op_name(node)
        return result.layout


class _Result:
    """What becomes of the layouts of an op's operands.

    Args:
        node: the op.
        sources: its operands with tokens, in order → their layouts.
    """

    def __init__(self, node: fx.Node, sources: Mapping[fx.Node, TokenLayout]) -> None:
        self.gone = False
        """Whether the result has no tokens: one of them was selected, or they were summed up."""
        self._node, self._sources = node, sources
        self.layout = self._find()

    def _find(self) -> TokenLayout | None:
        row = row_of(self._node)
        if self._node.target is operator.getitem:
            return self._element(*next(iter(self._sources.items())))
        return self._elementwise() if row is None else RULES[row.tokens](self, row)

    @property
    def _layout(self) -> TokenLayout:
        """The layout of the first operand with tokens."""
        return next(iter(self._sources.values()))

    def selected(self, row: OpRow) -> TokenLayout | None:
        """The layout without the axis that an element is selected from."""
        return self._without(self._layout, [_axis(schema_arguments(self._node)["dim"], len(self._layout.axes))])

    def reshaped(self, row: OpRow) -> TokenLayout | None:
        """The layout of the same elements in the result's shape."""
        return self._layout.reshaped(_lengths(self._node)) if next(iter(self._sources)) is self._node.args[0] else None

    def permuted(self, row: OpRow) -> TokenLayout | None:
        """The layout with its axes where the row's ``input_axis`` finds them."""
        assert row.input_axis is not None
        first, layout = next(iter(self._sources.items()))
        order = [row.input_axis(self._node, first, axis) for axis in range(len(layout.axes))]
        return TokenLayout(tuple(layout.axes[axis] for axis in order if axis is not None))

    def looked_up(self, row: OpRow) -> TokenLayout | None:
        """The layout of indices, with an axis of features behind."""
        return TokenLayout((*self._layout.axes, _others(self._node)[-1]))

    def queries(self, row: OpRow) -> TokenLayout | None:
        """The layout of the queries of attention."""
        query = self._node.args[0]
        return self._same(self._sources[query]) if isinstance(query, fx.Node) and query in self._sources else None

    def elementwise(self, row: OpRow) -> TokenLayout | None:
        """The layout of the operand that has the axes of the result."""
        return self._elementwise()

    def _element(self, source: fx.Node, layout: TokenLayout) -> TokenLayout | None:
        if isinstance(called_module(source), Recurrent) and self._node.args[1] != 0:
            self.gone = True  # a state
            return None
        return self._same(layout)

    def _without(self, layout: TokenLayout, axes: Sequence[int], keep: bool = False) -> TokenLayout | None:
        """The layout without these axes, or with their length 1."""
        self.gone = any(factor.is_row for axis in axes for factor in layout.axes[axis])
        if self.gone:
            return None
        one = (Factor(Count.OTHER, 1),)
        return TokenLayout(tuple(
            one if axis in axes else factors for axis, factors in enumerate(layout.axes) if keep or axis not in axes
        ))

    def reduced(self, row: OpRow) -> TokenLayout | None:
        """The layout without the axes ``dim``, or with their length 1."""
        layout = self._layout
        arguments, rank = schema_arguments(self._node), len(layout.axes)
        dims = arguments.get("dim")
        axes = range(rank) if dims is None or dims == [] else [_axis(dim, rank) for dim in _listed(dims)]
        return self._without(layout, list(axes), keep=bool(arguments.get("keepdim")))

    def product(self, row: OpRow) -> TokenLayout | None:
        """The rows of a matrix product's left operand, else the columns of the right one; else they are summed up."""
        result = _others(self._node)
        arguments = [self._node.args[position] for position in row.weights]
        operands = [self._sources.get(each) for each in arguments if isinstance(each, fx.Node)]
        for layout, summed in zip(operands, (-1, -2), strict=True):
            if layout is None or any(factor.is_row for factor in layout.axes[summed]):
                continue
            if len(layout.axes) < 2 or len(result) < 2:
                return None
            shift, axes = len(result) - len(layout.axes), list(result)
            for axis, factors in enumerate(layout.axes):
                if axis != len(layout.axes) + summed and not all(factor.is_other for factor in factors):
                    axes[axis + shift] = factors
            if summed == -1 and operands[1] is not None and [f.count for f in operands[1].axes[-1]] == [Count.TOKENS]:
                axes[-1] = tuple(replace(factor, count=Count.KEYS) for factor in operands[1].axes[-1])
            found = TokenLayout(tuple(axes))
            return found if found.lengths() == _lengths(self._node) else None
        self.gone = True
        return None

    def reordered(self, row: OpRow) -> TokenLayout | None:
        """The layout, unless the op moves or selects elements along the axes of samples or tokens, or says no axes."""
        layout = self._layout
        arguments, rank = schema_arguments(self._node), len(layout.axes)
        dims = arguments.get("dims", arguments.get("dim"))
        if dims is None or dims == [] or not all(isinstance(dim, int) for dim in _listed(dims)):
            return None
        moved = [factor for dim in _listed(dims) for factor in layout.axes[_axis(dim, rank)]]
        return None if any(factor.is_row for factor in moved) else self._same(layout)

    def _elementwise(self) -> TokenLayout | None:
        """The layout of the operand that has the axes of the result; any other operand may be broadcast."""
        lengths = _lengths(self._node)
        for layout in sorted(self._sources.values(), key=_keys, reverse=True):
            shift = len(lengths) - len(layout.axes)
            rows = [axis for axis, factors in enumerate(layout.axes) if not all(factor.is_other for factor in factors)]
            if shift >= 0 and all(layout.lengths()[axis] == lengths[axis + shift] for axis in rows):
                axes = list(_others(self._node))
                for axis in rows:
                    axes[axis + shift] = layout.axes[axis]
                return TokenLayout(tuple(axes))
        return None

    def _same(self, layout: TokenLayout) -> TokenLayout | None:
        """The layout of a value of the same axes; axes without rows may have other lengths."""
        self._sources = {self._node: layout}
        return self._elementwise() if len(_lengths(self._node)) == len(layout.axes) else None


RULES: Mapping[Tokens, Callable[[_Result, OpRow], TokenLayout | None]] = {
    Tokens.ELEMENTWISE: _Result.elementwise,
    Tokens.SELECTED: _Result.selected,
    Tokens.REDUCED: _Result.reduced,
    Tokens.RESHAPED: _Result.reshaped,
    Tokens.PERMUTED: _Result.permuted,
    Tokens.LOOKED_UP: _Result.looked_up,
    Tokens.MULTIPLIED: _Result.product,
    Tokens.REORDERED: _Result.reordered,
    Tokens.QUERIES: _Result.queries,
}


def _keys(layout: TokenLayout) -> int:
    """1 for attention scores; a mask over keys, which is added to them, has tokens where these have keys."""
    return sum(factor.count is Count.KEYS for factors in layout.axes for factor in factors)


def _has_values(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return any(isinstance(each, Tensor) for each in (value if isinstance(value, (list, tuple)) else [value]))


def _is_sized(node: fx.Node) -> bool:
    """Says whether the lengths of a value are known, not decided by data as ``nonzero`` does."""
    return all(map(has_length_hint, _value(node).shape))


def _lengths(node: fx.Node) -> tuple[int, ...]:
    """Axis lengths of a value; for a tuple, of its first element."""
    return tuple(length_hint(length) for length in _value(node).shape)


def _others(node: fx.Node) -> tuple[tuple[Factor, ...], ...]:
    """The axes of a value without rows."""
    shape = _value(node).shape
    return tuple((Factor(Count.OTHER, length_hint(each), isinstance(each, int)),) for each in shape)


def _value(node: fx.Node) -> Tensor:
    value = node.meta["val"]
    tensor = next(each for each in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(each, Tensor))
    assert isinstance(tensor, Tensor)
    return tensor


def _listed(dims: object) -> Sequence[int]:
    return [dims] if isinstance(dims, int) else list(dims)  # type: ignore[call-overload]


def _axis(dim: object, rank: int) -> int:
    assert isinstance(dim, int)
    return dim % rank
