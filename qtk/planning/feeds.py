"""Which ops a value feeds: ops that read it, directly or by sums, averages, bounds, magnitudes, merges and movement.

A product with a parameter or a number (layer scale) passes a value on, too. A softmax or sigmoid passes on that the
largest values are looked for, for it keeps their order: a router's.

In a transformer, the values that feed a norm are its residual stream: every sum that the next one adds to, the sum of
embeddings that it begins with, tokens that are concatenated to it, and what is taken or averaged from it at the end.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

from torch import fx

from qtk.graph.flow import Flow
from qtk.operators.op_row import Feeding, OpRow
from qtk.operators.op_table import PYTHON, ROWS
from qtk.planning.patterns import PatternMatch

LARGEST = frozenset(row.kind for row in ROWS.values() if row.feeding is Feeding.LARGEST)
"""Kinds of the ops that look for the largest values."""

OUTPUT = frozenset({"output"})
"""The name of what returns values."""


class Feeds:
    """The names of the ops that each value of a graph feeds.

    Args:
        graph: the graph.
        flow: of the graph.
        formulas: each op of a formula → the formula, which counts as one op.
        is_island: whether the model's own Python reads its outputs, which feed ``python``.
    """

    def __init__(
        self, graph: fx.Graph, flow: Flow, formulas: Mapping[fx.Node, PatternMatch], *, is_island: bool = False
    ) -> None:
        self._flow, self._formulas, self._is_island = flow, formulas, is_island
        self._names: dict[fx.Node, frozenset[str]] = {}
        for node in reversed(graph.nodes):
            self._names[node] = frozenset[str]().union(*(self.through(user, node) for user in node.users))

    def names(self, node: fx.Node) -> frozenset[str]:
        """The kinds and families of the ops that the value of ``node`` feeds; of a tuple, that any element feeds."""
        return self._names[node]

    def through(self, reader: fx.Node, value: fx.Node) -> frozenset[str]:
        """The names of the ops that ``value`` feeds by way of one op that reads it, that op among them."""
        if reader.op == "output":
            return OUTPUT | {PYTHON} if self._is_island else OUTPUT
        formula, row = self._formulas.get(reader), self._flow.row(reader)
        if formula is not None:
            return frozenset() if value in formula.nodes else frozenset({formula.kind})
        if row is None:
            return frozenset()
        if reader.target is operator.getitem:  # of the tuple ``value``
            return self._names[reader]
        if not any(port.value is value for port in self._flow.data_ports(reader)):
            return frozenset()
        if row.feeding is Feeding.ORDER:
            return self._names[reader] & LARGEST | frozenset(row.names)
        return self._names[reader] | frozenset(row.names) if self._hands_on(reader, row) else frozenset(row.names)

    def _hands_on(self, reader: fx.Node, row: OpRow) -> bool:
        """Says whether what an op makes of a value feeds what the value feeds."""
        if row.feeding is Feeding.SCALED:
            return sum(not self._flow.is_static(port.value) for port in self._flow.data_ports(reader)) == 1
        return row.keeps_elements or row.feeding is Feeding.RESULT
