"""Which ops a value feeds: ops that read it, directly or by sums, averages, bounds, magnitudes, merges and movement.

A product with a parameter or a number (layer scale) passes a value on, too. A product of two values, or a quotient,
has the relative errors of both, and passes on the ops that need small ones, roots and logarithms: a running variance
is a gain times the mean of squares. So have sums of positive multiples, such as a bank of mel filters computes, and
powers of magnitudes. A softmax or sigmoid passes on that the largest values are looked for, for it keeps their order: a
router's.

In a transformer, the values that feed a norm are its residual stream: every sum that the next one adds to, the sum of
embeddings that it begins with, tokens that are concatenated to it, and what is taken or averaged from it at the end.

A state that is in the sum which becomes its next value (a running average, an integrator) is an accumulator, which
feeds itself, as do the other terms. The state of an LSTM or GRU is none: its gate multiplies it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

from torch import Tensor, fx

from qtk.graph.evaluate import evaluate
from qtk.graph.flow import Flow
from qtk.graph.sites import is_float
from qtk.operators.op_row import Feeding, OpRow, Role
from qtk.operators.op_table import ACCUMULATOR, PYTHON, ROWS
from qtk.planning.patterns import RULE_NAMES, PatternMatch

LARGEST = frozenset(row.kind for row in ROWS.values() if row.feeding is Feeding.LARGEST)
"""Kinds of the ops that look for the largest values."""

RELATIVE = frozenset(name for row in ROWS.values() if row.feeding is Feeding.RELATIVE for name in row.names)
"""Kinds and families of the ops that need small relative errors."""

OUTPUT = frozenset({"output"})
"""The name of what returns values."""

NOTHING = frozenset[str]()


class Feeds:
    """The names of the ops that each value of a graph feeds.

    Args:
        graph: the graph.
        flow: of the graph.
        formulas: each op of a formula → the formula, which counts as one op.
        states: what reads a state → its next value.
        is_island: whether the model's own Python reads its outputs, which feed ``python``.

    Attributes:
        accumulators: what reads the states that are in the sums which become their next values.
    """

    def __init__(
        self, graph: fx.Graph, flow: Flow, formulas: Mapping[fx.Node, PatternMatch], states: Mapping[fx.Node, fx.Node],
        *, is_island: bool = False,
    ) -> None:
        self._flow, self._formulas = flow, formulas
        self._values: dict[fx.Node, object] = {}
        self._names: dict[fx.Node, frozenset[str]] = {}
        self._returned = OUTPUT | {PYTHON} if is_island else OUTPUT
        self.accumulators = {state for state, following in states.items() if self._accumulates(state, following)}
        self._names = {
            states[state]: frozenset({ACCUMULATOR}) for state in self.accumulators}
        for node in reversed(graph.nodes):
            self._names[node] = self._names.get(node, NOTHING).union(*(self.through(user, node) for user in node.users))

    def names(self, node: fx.Node) -> frozenset[str]:
        """The kinds and families of the ops that the value of ``node`` feeds; of a tuple, that any element feeds."""
        return self._names[node]

    def through(self, reader: fx.Node, value: fx.Node) -> frozenset[str]:
        """The names of the ops that ``value`` feeds by way of one op that reads it, that op among them."""
        if reader.op == "output":
            return self._returned
        formula, row = self._formulas.get(reader), self._flow.row(reader)
        if formula is not None:
            return NOTHING if value in formula.nodes else frozenset({formula.kind})
        if row is None or not self._takes(reader, value):
            return NOTHING
        own = NOTHING if reader.target is operator.getitem else frozenset(row.names)
        return own | self._names[reader] & self._passed_on(reader, row, value)

    def _takes(self, reader: fx.Node, value: fx.Node) -> bool:
        """Says whether an op reads a value as data, or from a tuple."""
        return reader.target is operator.getitem or any(
            port.value is value for port in self._flow.data_ports(reader))

    def _passed_on(self, reader: fx.Node, row: OpRow, value: fx.Node) -> frozenset[str]:
        """Returns which of the ops that the result of ``reader`` feeds are fed by a value that it reads, too."""
        if row.feeding is Feeding.ORDER:
            return LARGEST
        is_magnitude = self._flow.row(self._flow.root(value)) is ROWS["abs"]
        if self.adds_alone(reader, value) or (row.kind == "pow" and is_magnitude):
            return RELATIVE
        if row.feeding in (Feeding.SCALED, Feeding.ADDED):
            ports = self._flow.data_ports(reader)
            terms = [port.value for port in ports if row.feeding is Feeding.ADDED and port.arg == 0]
            is_alone = sum(not self._flow.is_static(port.value) for port in ports if port.value not in terms) == 1
            is_divisor = any(port.value is value and port.arg in row.divisors for port in ports)
            return RULE_NAMES if value in terms or (is_alone and not is_divisor) else RELATIVE
        is_same = reader.target is operator.getitem or row.keeps_elements or row.feeding is Feeding.RESULT
        return RULE_NAMES if is_same else NOTHING

    def adds_alone(self, reader: fx.Node, value: fx.Node) -> bool:
        """Says whether a product for a root or logarithm adds multiples of a value, as a bank of mel filters does."""
        row, others = self._flow.row(reader), [read for read in reader.all_input_nodes if read is not value]
        if row is None or not row.multiplies or RELATIVE.isdisjoint(self._names.get(reader, NOTHING)):
            return False
        if not others or not all(self._flow.is_static(read) and is_float(read) for read in others):
            return False
        weights = [evaluate(read, self._values, bypass_quantizers=True) for read in others]
        return all(isinstance(each, Tensor) and bool((each >= 0).all()) for each in weights)

    def _accumulates(self, state: fx.Node, following: fx.Node) -> bool:
        """Says whether a state reaches its next value by sums and products with numbers, one op of these at least."""
        seen, ahead = set[tuple[fx.Node, bool]](), [(state, False)]
        while ahead:
            node, is_changed = ahead.pop()
            if node is following and is_changed:
                return True
            if (node, is_changed) in seen:
                continue
            seen.add((node, is_changed))
            for reader in node.users:
                row = self._flow.row(reader)
                if row is None or reader in self._formulas or not self._takes(reader, node):
                    continue
                if ACCUMULATOR in self._passed_on(reader, row, node):
                    ahead.append((reader, is_changed or row.role is Role.COMPUTE))
        return False
