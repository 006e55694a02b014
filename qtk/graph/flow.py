"""The value flow of a graph through data movement: which op computes a value, which ops read it, where its axes go."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator

from torch import Tensor, fx

from qtk.graph.sites import EXCLUDED, Port, is_float, label, ports
from qtk.graph.written_buffers import is_input, is_state, is_write
from qtk.operators.lookup import row_of
from qtk.operators.op_row import OpRow, Role
from qtk.operators.targets import aten_name, called_module

SHAPE_QUERY = re.compile(r"sym_\w+|size|numel|dim|_assert_tensor_metadata")


class Flow:
    """The value flow of one captured graph, as it was at construction: make a new one after an edit.

    Args:
        graph: the graph; ``losses``: its ops that compute a loss, see ``loss_nodes``.
        is_nested: whether it is inside a composite, whose weights are inputs of the graph.
        with_excluded: whether ops of excluded modules have rows.
    """

    def __init__(self, graph: fx.Graph, *, is_nested: bool = False, with_excluded: bool = False) -> None:
        self._is_nested = is_nested
        self._static: dict[fx.Node, bool] = {}
        self._rows: dict[fx.Node, OpRow | None] = {}
        self._constant: dict[fx.Node, bool] = {}
        self._carried: dict[fx.Node, fx.Node | None] = {}
        self.losses = set() if is_nested else loss_nodes(graph)
        for node in graph.nodes:
            self._static[node] = not is_input(node) and all(self._static[arg] for arg in node.all_input_nodes)
            in_float = (label(node, EXCLUDED) and not with_excluded) or node in self.losses or is_state(node)
            self._rows[node] = None if in_float else row_of(maker(node))

    def row(self, node: fx.Node) -> OpRow | None:
        """The row of the op that makes the value of ``node``; ``None`` if unknown, excluded, a state, or of a loss."""
        return self._rows[node]

    def is_static(self, node: fx.Node) -> bool:
        """Says whether the value is computed from parameters, constants and buffers that the graph does not write."""
        return self._static[node]

    def is_parameter(self, node: fx.Node) -> bool:
        """Says whether the elements come from a static value by movement; data (indices) may decide which of them."""
        return self._static[self.root(node)]

    def is_constant(self, node: fx.Node) -> bool:
        """Says whether the value is a number, not data: one static element, a created constant, or a merge of such."""
        if node not in self._constant:
            row, carried = self._rows[node], self.carried(node)
            if row is not None and row.role is Role.CREATE:
                self._constant[node] = True
            elif carried is not None:
                self._constant[node] = self.is_constant(carried)
            elif row is not None and row.role is Role.MERGE and not self._static[node]:
                merged = [port.value for port in ports(node) if is_float(port.value) and port.arg in (row.inputs or ())]
                self._constant[node] = bool(merged) and all(self.is_constant(value) for value in merged)
            else:
                self._constant[node] = self._static[node] and node.meta["val"].numel() == 1
        return self._constant[node]

    def data_ports(self, node: fx.Node) -> list[Port]:
        """The ports of an op at which it reads data: floats that are no weights, biases or numbers.

        What an op multiplies with, and is not made of parameters alone, is data too, but in a nested graph.
        """
        row = self._rows[node]
        if row is None or maker(node) is not node:
            return []
        weights = {port.index for port in self.weight_ports(node)}
        multiplied = row.weights if row.multiplies and not self._is_nested else ()
        return [
            port
            for port in ports(node)
            if is_float(port.value)
            and (row.inputs is None or port.arg in row.inputs or port.arg in multiplied)
            and port.index not in weights
            and not self.is_constant(port.value)
        ]

    def weight_ports(self, node: fx.Node) -> list[Port]:
        row = self._rows[node]
        if row is None or maker(node) is not node:
            return []
        return [p for p in ports(node) if p.arg in row.weights and is_float(p.value) and self.is_parameter(p.value)]

    def bias_ports(self, node: fx.Node) -> list[Port]:
        row = self._rows[node]
        if row is None or row.bias is None or maker(node) is not node:
            return []
        return [port for port in ports(node) if port.arg == row.bias and is_float(port.value)]

    def carried(self, node: fx.Node) -> fx.Node | None:
        """The value whose elements ``node`` moves unchanged, ``None`` if ``node`` computes new ones."""
        if node not in self._carried:
            self._carried[node] = self._find_carried(node)
        return self._carried[node]

    def _find_carried(self, node: fx.Node) -> fx.Node | None:
        row = self._rows[node]
        if row is None:
            return None
        if maker(node) is not node:  # an element of a tuple
            return self._first_float(maker(node)) if row.role is Role.MOVEMENT else None
        if row.role is Role.MOVEMENT:
            return self._first_float(node)
        if row.role is Role.MERGE:
            sources = [port.value for port in self.data_ports(node)]
            return sources[0] if len(sources) == 1 else None
        return None

    def root(self, node: fx.Node) -> fx.Node:
        """The node that computed the elements of ``node``."""
        while (source := self.carried(node)) is not None:
            node = source
        return node

    def readers(self, node: fx.Node) -> Iterator[Port]:
        """Every port that reads the elements of ``node``, looking through data movement.

        Outputs and the writes of buffers are among them, see ``is_result``.
        """
        for user in node.users:
            if user.op == "output" or (not is_float(user) and not isinstance(user.meta.get("val"), (list, tuple))):
                yield from (port for port in _output_ports(user) if port.value is node)
            elif self.carried(user) is not None or (_is_tuple(user) and self._moves_tuple(user)):
                if self._carries(user, node):
                    yield from self.readers(user)
            else:
                yield from (port for port in ports(user) if port.value is node)

    def next_ops(self, node: fx.Node) -> list[fx.Node]:
        """The ops that read elements of ``node`` and not its shape alone, as ``mask.view_as(node)`` does."""
        return [user for user in node.users if not reads_shape_only(user) and (_moved(user) or node) is node]

    def axis_at_root(self, node: fx.Node, axis: int) -> int | None:
        """The axis of ``root(node)`` that became ``axis`` of ``node``; ``None`` if a reshape mixed it."""
        while (source := self.carried(node)) is not None:
            if source is not node.args[0] and node.target is not operator.getitem:
                return None
            row = self._rows[node]
            source_axis = row.input_axis(node, source, axis) if row is not None and row.input_axis is not None else None
            if source_axis is None:
                return None
            node, axis = source, source_axis
        return axis

    def _first_float(self, node: fx.Node) -> fx.Node | None:
        first = next(ports(node), None)
        return first.value if first is not None and is_float(first.value) else None

    def _moves_tuple(self, node: fx.Node) -> bool:
        row = self._rows[node]
        return row is not None and row.role is Role.MOVEMENT

    def _carries(self, user: fx.Node, node: fx.Node) -> bool:
        if _is_tuple(user):
            return self._first_float(user) is node
        return user.target is operator.getitem or self.carried(user) is node


def is_result(port: Port) -> bool:
    """Says whether the value at a port is an output of the graph, or what a buffer is in the next call."""
    return port.user.op == "output" or is_write(port.user)


def maker(node: fx.Node) -> fx.Node:
    """The op that makes the value of ``node``: itself, or the op whose tuple it is an element of."""
    while node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """All nodes that ``nodes`` depend on."""
    found, pending = set[fx.Node](), list(nodes)
    while pending:
        new = [source for source in pending.pop().all_input_nodes if source not in found]
        found.update(new)
        pending += new
    return found


def reads_shape_only(node: fx.Node) -> bool:
    """Says whether an op reads the shapes of its operands alone."""
    row = row_of(node)
    if row is not None:
        return row.role is Role.CREATE
    return SHAPE_QUERY.fullmatch(aten_name(node.target) or "") is not None


def _moved(node: fx.Node) -> object:
    """Returns what an op such as ``expand_as`` moves into the shape or type of its other operand, or ``None``."""
    return node.args[0] if (aten_name(node.target) or "").endswith("_as") else None


def _is_tuple(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (list, tuple))


def _output_ports(node: fx.Node) -> Iterator[Port]:
    for index, value in enumerate(node.all_input_nodes):
        yield Port(node, 0, index, index, value)


def loss_nodes(graph: fx.Graph) -> set[fx.Node]:
    """The ops that compute a loss, and its targets: inputs that nothing else reads.

    From an op of a loss, through ops without weights, only scalars that the graph returns are reached, and one of them
    depends on a target.
    """
    tail: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op in ("get_attr", "output") or not node.users:
            continue
        if not all(_ends(node, user, tail) for user in node.users):
            continue
        row = row_of(node)
        if not (row is not None and (row.weights or row.multiplies)) and not _is_composite(node):
            tail.add(node)
    loss = {node for node in tail if node.op == "placeholder"}
    for node in graph.nodes:
        if node in tail and not loss.isdisjoint(node.all_input_nodes):
            loss.add(node)
    for node in reversed(graph.nodes):
        if node in tail and not loss.isdisjoint(node.users):
            loss.add(node)
    return loss


def _ends(node: fx.Node, user: fx.Node, tail: set[fx.Node]) -> bool:
    """Says whether what ``user`` does with the value of ``node`` ends in scalars."""
    value = node.meta.get("val")
    return user in tail or (user.op == "output" and isinstance(value, Tensor) and value.ndim == 0)


def _is_composite(node: fx.Node) -> bool:
    module = called_module(node)
    return module is not None and any(True for _ in module.children())
