"""The free axes of a graph, and calls in which they have other lengths."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from qtk.calls.calls import Call, distinct
from qtk.calls.inputs import is_free
from qtk.calls.served_sizes import Axis
from qtk.capture.free_shapes import leaf_numbers
from qtk.capture.prepared_model import PreparedGraph
from qtk.torch_private import pytree

Lengths = Mapping[Axis, int]


class FreeAxes:
    """The axes of the inputs of a graph.

    ``numbers``: name of an input → its number among the leaves of the arguments; ``lengths``: axis → its length in the
    example; ``symbols``: free axis → the symbol of its size; ``sizes``: the sizes themselves.

    Args:
        graph: the graph.
        call: an example that it serves.
    """

    def __init__(self, graph: PreparedGraph, call: Call) -> None:
        self._graph, (self._args, self._kwargs) = graph, distinct((call.args, call.kwargs))
        self._names: dict[int, str] = {}
        self.numbers: dict[str, int] = {}
        self.lengths: dict[Axis, int] = {}
        self.symbols: dict[Axis, str] = {}
        self.sizes: list[torch.SymInt] = []
        leaves, numbers = graph.leaves(self._args, self._kwargs), leaf_numbers(self._args, self._kwargs)
        for node, leaf in zip(graph.graph.find_nodes(op="placeholder"), leaves, strict=True):
            value, name = node.meta.get("val"), str(node.target)
            if not isinstance(leaf, Tensor) or not isinstance(value, Tensor) or leaf.layout is not torch.strided:
                continue
            self._names[id(leaf)], self.numbers[name] = name, numbers[id(leaf)]
            for number, size in enumerate(value.shape):
                self.lengths[name, number] = leaf.shape[number]
                if is_free(size):
                    assert isinstance(size, torch.SymInt)
                    self.symbols[name, number] = str(size)
                    self.sizes.append(size)

    def axes_of(self, symbols: Collection[str]) -> list[Axis]:
        """The axes whose lengths these symbols are."""
        return [axis for axis, symbol in self.symbols.items() if symbol in symbols]

    def lengths_in(self, call: Call) -> Lengths:
        """The lengths of the free axes in another call that the graph takes."""
        names = [str(node.target) for node in self._graph.graph.find_nodes(op="placeholder")]
        leaves = dict(zip(names, self._graph.leaves(call.args, call.kwargs), strict=True))
        shapes = {name: leaf.shape for name, leaf in leaves.items() if isinstance(leaf, Tensor)}
        return {(name, number): shapes[name][number] for name, number in self.symbols}

    def call(self, lengths: Lengths) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, cut to these lengths, or with their first elements repeated behind the last."""

        def resized(leaf: object) -> object:
            name = self._names.get(id(leaf))
            if not isinstance(leaf, Tensor) or name is None:
                return leaf
            for number, before in enumerate(leaf.shape):
                length = lengths.get((name, number), before)
                if length != before:
                    leaf = leaf.index_select(number, torch.arange(length, device=leaf.device) % before)
            return leaf

        changed: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(resized, (self._args, self._kwargs))
        return changed


def two_rows(graph: PreparedGraph, call: Call) -> Call:
    """``call`` with 2 rows where the batch is free, and with 2 along other free axes that have length 1 in it."""
    axes = FreeAxes(graph, call)
    return _resized(axes, call, dict.fromkeys([*_of_rows(axes), *(a for a in axes.symbols if axes.lengths[a] == 1)], 2))


def at_most_rows(graph: PreparedGraph, call: Call, rows: int) -> Call:
    """``call`` with its first rows, so many at most, where the batch is free."""
    axes = FreeAxes(graph, call)
    return _resized(axes, call, {axis: min(axes.lengths[axis], rows) for axis in _of_rows(axes)})


def _of_rows(axes: FreeAxes) -> list[Axis]:
    """The axes whose length is a batch: free axes 0, and what is as long by the graph."""
    return axes.axes_of({symbol for (_, number), symbol in axes.symbols.items() if number == 0})


def _resized(axes: FreeAxes, call: Call, lengths: Lengths) -> Call:
    return Call(*axes.call(lengths), None) if any(axes.lengths[axis] != lengths[axis] for axis in lengths) else call
