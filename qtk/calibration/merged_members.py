"""Samples of what float merges join, in the quantized values behind them: all of a merge has one range there.

A merge (concat, stack, where, slice assignment) that stays in float keeps the ranges of its operands apart. What is
computed from it element by element, and quantized per tensor, does not. Which element comes from which operand is found
by running the ops between once, on labels in place of values.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from qtk.calibration.sampled_values import some_values
from qtk.calls.inputs import input_leaves
from qtk.core.site import Site
from qtk.data.valid_tokens import ValidTokens
from qtk.graph.captured_graph import CapturedGraph
from qtk.graph.evaluate import evaluate_node
from qtk.graph.flow import Flow, ancestors
from qtk.graph.graphs import roots
from qtk.graph.insert import quantizer_called
from qtk.graph.simulation import Simulation
from qtk.graph.sites import SITE, edge_site, is_float, label
from qtk.layerwise.path_evaluator import quantizers_in
from qtk.operators.op_row import OpRow, Role, Scaling
from qtk.quantizers.modes import in_mode
from qtk.quantizers.quantizer import Mode

ELEMENTWISE = frozenset({Scaling.KEPT, Scaling.CLAMPED, Scaling.ADDED, Scaling.MULTIPLIED, Scaling.DIVIDED})
"""What becomes of factors of channels in ops that compute each element from the elements at its own place."""

NO_MEMBER = -1.0
"""The label of elements that are none of a member."""


class MemberSamples:
    """Values of each operand of a float merge, in the first call of its graph, at the quantizers that read them all.

    ``values``: site of the quantizer → name of the operand → values. Nothing is run where no quantizer reads a merge
    like that.

    Args:
        simulation: its graphs.
        sites: the sites whose values may be sampled.
        tokens: which tokens are sampled; ``None``: all.
    """

    def __init__(self, simulation: Simulation, sites: Container[Site], tokens: ValidTokens | None = None) -> None:
        self.values: dict[Site, dict[str, Tensor]] = {}
        self._tokens = tokens
        by_name = {site.name: site for site in simulation.plan if site in sites}
        self._readers = {
            graph: found for graph in roots(simulation.model).values() if (found := _readers(graph, by_name))
        }

    @contextmanager
    def followed(self) -> Iterator[None]:
        """The first call of each graph in the body is sampled."""
        handles = [graph.register_forward_pre_hook(self._sample, with_kwargs=True) for graph in self._readers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def _sample(self, graph: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert isinstance(graph, CapturedGraph)
        readers = self._readers.get(graph)
        if readers is None:
            return
        leaves = input_leaves(graph.graph, args, kwargs)
        if not all(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor)):
            return
        del self._readers[graph]
        with in_mode(quantizers_in(graph), Mode.BYPASS):
            for node, members in _LabelWalk(graph, self._tokens).run(leaves, readers):
                self.values[readers[node]] = members


def _readers(graph: CapturedGraph, sites: dict[str, Site]) -> dict[fx.Node, Site]:
    """The calls of quantizers of ``sites`` that read elements of a float merge, or what is computed from them."""
    flow, labelled, found = Flow(graph.graph), set[fx.Node](), dict[fx.Node, Site]()
    for node in graph.graph.nodes:
        read = labelled.intersection(node.all_input_nodes)
        if _is_float_merge(flow, node):
            labelled.add(node)
        elif quantizer_called(node) is not None and read:
            labelled.add(node)
            site = sites.get(str(label(node, SITE)))
            found |= {} if site is None else {node: site}
        elif read and (_moved(flow, node) in labelled or _is_elementwise(flow.row(node))):
            labelled.add(node)
    return found


def _is_float_merge(flow: Flow, node: fx.Node) -> bool:
    row = flow.row(node)
    return row is not None and row.role is Role.MERGE and len(flow.data_ports(node)) > 1 and all(
        quantizer_called(user) is None for user in node.users)


def _is_elementwise(row: OpRow | None) -> bool:
    return row is not None and (row.activation or row.scales_as in ELEMENTWISE)


def _moved(flow: Flow, node: fx.Node) -> fx.Node | None:
    """The value whose elements an op moves, its own tuple included; ``None`` of other ops."""
    row = flow.row(node)
    if row is None or row.role not in (Role.MOVEMENT, Role.MERGE):
        return None
    first = node.args[0] if node.args else None
    is_tuple = isinstance(node.meta.get("val"), (list, tuple)) or (
        isinstance(first, fx.Node) and isinstance(first.meta.get("val"), (list, tuple)))
    return first if is_tuple and isinstance(first, fx.Node) else flow.carried(node)


class _LabelWalk:
    """Runs a graph in float, with the labels of members beside the values."""

    def __init__(self, graph: CapturedGraph, tokens: ValidTokens | None) -> None:
        self._graph, self._flow, self._tokens = graph.graph, Flow(graph.graph), tokens
        self._values: dict[fx.Node, Any] = {}
        self._labels: dict[fx.Node, Any] = {}
        self._names: list[str] = []

    def run(self, leaves: list[object], readers: dict[fx.Node, Site]) -> Iterator[tuple[fx.Node, dict[str, Tensor]]]:
        """Yields each reader that several members reach, with values of each."""
        needed = {*readers, *ancestors(readers)}
        remaining = {node: sum(user in needed for user in node.users) for node in needed}
        inputs = dict(zip(self._graph.find_nodes(op="placeholder"), leaves, strict=True))
        for node in self._graph.nodes:
            if node not in needed:
                continue
            self._values[node] = inputs[node] if node in inputs else evaluate_node(
                node, self._values.__getitem__, bypass_quantizer=True)
            labels = self._labels_of(node)
            if labels is not None:
                self._labels[node] = labels
            if node in readers and isinstance(labels, Tensor):
                members = self._members(node, self._values[node], labels)
                if len(members) > 1:
                    yield node, members
            for read in node.all_input_nodes:
                remaining[read] -= 1
                if not remaining[read]:
                    self._values.pop(read, None)
                    self._labels.pop(read, None)

    def _members(self, node: fx.Node, value: Tensor, labels: Tensor) -> dict[str, Tensor]:
        members = {}
        counted = None if self._tokens is None else self._tokens.counted_at(node, value)
        labels = labels if counted is None else labels.where(counted, NO_MEMBER)
        for index in torch.unique(labels).tolist():
            if index in range(len(self._names)):
                own = value[labels == index]
                members[self._names[int(index)]] = some_values(own).float()
        return members

    def _labels_of(self, node: fx.Node) -> Any:
        if quantizer_called(node) is not None:
            return self._labels.get(node.all_input_nodes[0])
        if _is_float_merge(self._flow, node):
            new: dict[fx.Node, float] = {}
            for port in self._flow.data_ports(node):
                if port.value not in self._labels and port.value not in new:
                    new[port.value] = float(len(self._names))
                    self._names.append(edge_site(port).name)
            known = [index for read in node.all_input_nodes for index in self._labels_in(read)]
            merged = self._moved_labels(node, lambda read: new.get(read, NO_MEMBER))
            if not isinstance(merged, Tensor):
                return None
            own = torch.isin(merged, torch.tensor([*known, *new.values()], device=merged.device))
            return torch.where(own, merged, NO_MEMBER)  # index_add and the like add labels up
        if not self._labels.keys() & set(node.all_input_nodes):
            return None
        if _moved(self._flow, node) in self._labels:
            return self._moved_labels(node, lambda read: NO_MEMBER)
        value = self._values[node]
        if _is_elementwise(self._flow.row(node)) and isinstance(value, Tensor):
            expanded = (_expanded(self._labels.get(read), value) for read in node.all_input_nodes)
            return next((labels for labels in expanded if labels is not None), None)
        return None

    def _labels_in(self, node: fx.Node) -> list[float]:
        labels = self._labels.get(node)
        return torch.unique(labels).tolist() if isinstance(labels, Tensor) else []

    def _moved_labels(self, node: fx.Node, other: Callable[[fx.Node], float]) -> Any:
        """Returns what an op makes of labels in place of floats, ``None`` if it does not run on them.

        ``other``: the label of a value that has none.
        """
        def read(argument: fx.Node) -> Any:
            if argument in self._labels:
                return self._labels[argument]
            value = self._values[argument]
            return torch.full_like(value, other(argument), dtype=torch.float32) if is_float(argument) else value

        try:
            return evaluate_node(node, read)
        except Exception:  # whatever an op asks of its values; the call itself runs behind this one
            return None


def _expanded(labels: object, value: Tensor) -> Tensor | None:
    """Labels in the shape of what is computed from their elements, if they fit."""
    if not isinstance(labels, Tensor) or labels.ndim > value.ndim:
        return None
    lengths = zip(reversed(labels.shape), reversed(value.shape), strict=False)
    return labels.expand(value.shape) if all(own in (1, length) for own, length in lengths) else None
