"""Evaluates a captured graph on several paths side by side: as the float model and as the quantized model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, fx, nn

from qtk.graph.captured_graph import CapturedGraph
from qtk.graph.evaluate import evaluate_node
from qtk.graph.insert import quantizer_nodes
from qtk.graph.written_buffers import is_input
from qtk.layerwise.decisions import decided_as, decides, sorted_stably, sorts_ids
from qtk.layerwise.live_values import Values
from qtk.operators.targets import attribute, called_module
from qtk.quantizers.modes import in_mode
from qtk.quantizers.quantizer import Mode, Quantizer


class PathEvaluator:
    """Evaluates nodes on every path; once where the paths read the same objects and no quantizer acts.

    Parameters, quantized or not, are read anew at each use, since their layer may have been updated in between. The
    float path uses copies of the parameters before the update.

    What data decide by order (top-k, sort, argmax) is decided on the first path for all, so that rows which are routed
    by it are pairs. A sort of integers (rows by the ids of their experts) leaves equal ones in order.

    Args:
        graph: with quantizers inserted.
        quantized: for each path, whether quantizers act on it.
        moved: the ops that move parameters which are updated; they run at each use.
    """

    def __init__(self, graph: CapturedGraph, quantized: tuple[bool, ...], moved: Collection[fx.Node] = ()) -> None:
        self.quantized = quantized
        self._moved = frozenset(moved)
        self.quantizers = quantizer_nodes(graph)
        self._graph = graph
        self._inner_quantizers = {
            node: inner for node in graph.graph.nodes
            if (module := called_module(node)) is not None and (inner := quantizers_in(module))
        }
        self._sorts_of_ids = {node for node in graph.graph.nodes if sorts_ids(node)}
        self._parameter_nodes: set[fx.Node] = set()
        self._last_reads: dict[str, tuple[Tensor, int]] = {}  # of a parameter: itself, and the index of the node
        self._float_copies: dict[str, Tensor] = {}
        self._stand_ins: dict[str, Callable[[], Tensor]] = {}
        for index, node in enumerate(graph.graph.nodes):
            if node.op == "get_attr" or node in self._moved or (
                node in self.quantizers and node.all_input_nodes[0] in self._parameter_nodes
            ):
                self._parameter_nodes.add(node)
            for read in node.all_input_nodes:
                root = self._root(read)
                if root is not None:
                    name = str(root.target)
                    self._last_reads[name] = attribute(graph, name), index

    def is_parameter(self, node: fx.Node) -> bool:
        """Says whether a node is a parameter, quantized or not, or moved."""
        return node in self._parameter_nodes

    def float_parameters(self, begin: int, end: int, without: Collection[int] = ()) -> list[Tensor]:
        """The parameters that are read from node index ``begin`` to before ``end`` alone, and by no quantizer.

        ``without``: nodes that read none of them.
        """
        places: dict[str, list[int]] = {}
        quantized = {str(root.target) for node in self.quantizers if (root := self._root(node)) is not None}
        for index, node in enumerate(self._graph.graph.nodes):
            for read in () if self.is_parameter(node) else node.all_input_nodes:
                root = self._root(read)
                if root is not None:
                    places.setdefault(str(root.target), []).append(index)
        inside = [name for name, read_at in places.items()
                  if all(begin <= index < end and index not in without for index in read_at)]
        return [self._last_reads[name][0] for name in inside if name not in quantized]

    @contextmanager
    def replaced(self, parameters: Mapping[Tensor, Callable[[], Tensor]]) -> Iterator[None]:
        """While the body runs, quantized paths read other values in the place of ``parameters``."""
        self._stand_ins = {name: value for name, (tensor, _) in self._last_reads.items()
                           for parameter, value in parameters.items() if tensor is parameter}
        try:
            yield
        finally:
            self._stand_ins = {}

    def _root(self, node: fx.Node) -> fx.Node | None:
        """The parameter that a node is, quantizes or moves; ``None`` for other nodes."""
        while node.op != "get_attr" and self.is_parameter(node):
            node = node.all_input_nodes[0]
        return node if node.op == "get_attr" else None

    def reads(self, node: fx.Node) -> list[fx.Node]:
        """The nodes whose values a node needs when it runs, the nodes of its moved parameters included."""
        needed = dict.fromkeys(node.all_input_nodes)
        for read in node.all_input_nodes:
            if read in self._moved:
                needed |= dict.fromkeys(self.reads(read))
        return list(needed)

    def parameter(self, node: fx.Node) -> fx.Node:
        """The quantized parameter that a node moves; the node itself, if it moves none."""
        while node in self._moved:
            node = node.all_input_nodes[0]
        return node

    def value(self, node: fx.Node, values: Values, path: int) -> Any:
        """The value of a node on a path: from ``values``, or read anew for a parameter."""
        if not self.is_parameter(node):
            return values[node][path]
        name = str(node.target)
        if self.quantized[path] and name in self._stand_ins:
            return self._stand_ins[name]()
        copy = None if self.quantized[path] else self._float_copies.get(name)
        return self.evaluate(node, values, path) if copy is None else copy

    def evaluate(self, node: fx.Node, values: Values, path: int) -> Any:
        """Runs a node on a path."""
        def read(argument: fx.Node) -> Any:
            return self.value(argument, values, path)

        if node in self._sorts_of_ids:
            return sorted_stably(node, read(node.all_input_nodes[0]))
        if self.quantized[path]:
            return evaluate_node(node, read)
        with in_mode(self._inner_quantizers.get(node, ()), Mode.BYPASS):
            return evaluate_node(node, read, bypass_quantizer=True)

    def run(self, node: fx.Node, values: Values) -> None:
        """Runs a node on all paths and adds its values to ``values``, but of inputs, states and parameters."""
        if node.op == "output" or is_input(node) or self.is_parameter(node):
            return
        first = self.evaluate(node, values, 0)
        if node not in self._inner_quantizers and self._reads_the_same(node, values):
            values[node] = (first,) * len(self.quantized)
        elif decides(node):
            others = (self.value(node.all_input_nodes[0], values, path) for path in range(1, len(self.quantized)))
            values[node] = (first, *(decided_as(first, node, x) for x in others))
        else:
            values[node] = (first, *(self.evaluate(node, values, path) for path in range(1, len(self.quantized))))

    def keep_float(self, parameters: Sequence[Tensor | None]) -> None:
        """Copies the ``parameters`` that the float path reads, before they change."""
        for name, (tensor, _) in self._last_reads.items():
            is_kept = name in self._float_copies  # before another part of it was updated
            if False in self.quantized and not is_kept and any(tensor is parameter for parameter in parameters):
                self._float_copies[name] = tensor.detach().clone()

    def drop_float(self, begin: int) -> None:
        """Drops the copies, and the cached quantized parameters, that no node from index ``begin`` on reads."""
        self._float_copies = {
            name: copy for name, copy in self._float_copies.items() if self._last_reads[name][1] >= begin
        }
        for node, quantizer in self.quantizers.items():
            root = self._root(node)
            if root is not None and self._last_reads[str(root.target)][1] < begin:
                quantizer.weight_cache.clear()

    def _reads_the_same(self, node: fx.Node, values: Values) -> bool:
        """Says whether a node reads the same objects on all paths."""
        for read in node.all_input_nodes:
            if self.is_parameter(read):
                if read in self.quantizers or str(read.target) in self._float_copies:
                    return False
                if read in self._moved and not self._reads_the_same(read, values):
                    return False
            elif any(value is not values[read][0] for value in values[read]):
                return False
        return True


def quantizers_in(module: nn.Module) -> list[Quantizer]:
    return [inner for inner in module.modules() if isinstance(inner, Quantizer)]
