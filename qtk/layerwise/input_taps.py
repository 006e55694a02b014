"""Taps on the inputs of weighted ops inside modules that are run as a whole: loops over time, a model's own Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from torch import Tensor, fx, nn

from qtk.graph.captured_graph import CapturedGraph
from qtk.graph.graphs import graphs
from qtk.graph.op_table import row_of
from qtk.nn.tap import Tap

TAPS = "qtk_taps"
"""The submodule of a graph that holds its taps."""

Listener: TypeAlias = Callable[[Tensor, Tensor], None]
"""A function called with input and weight at every call of a tapped op."""


@contextmanager
def input_taps(module: nn.Module, listener: Listener) -> Iterator[None]:
    """Taps every weighted op in the graphs inside ``module`` while the body runs."""
    tapped: list[CapturedGraph] = []
    try:
        for graph in graphs(module).values():
            tapped.append(graph)
            _add(graph, listener)
        yield
    finally:
        for graph in tapped:
            _remove(graph)


class _InputTap(Tap):
    def __init__(self, listener: Listener) -> None:
        super().__init__()
        self._listener = listener

    @property
    def idle(self) -> bool:
        return False

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """Shape: any; result ``x``."""
        self._listener(x, weight)
        return x


def _add(graph: CapturedGraph, listener: Listener) -> None:
    for node in list(graph.graph.nodes):
        row = row_of(node)
        if row is None or not row.weights or node.op != "call_function" or row.data_arg is None:
            continue
        x, weight = node.args[row.data_arg], node.args[row.weights[-1]]
        if isinstance(x, fx.Node) and isinstance(weight, fx.Node) and x is not weight:
            if not hasattr(graph, TAPS):
                graph.add_module(TAPS, _InputTap(listener))
            with graph.graph.inserting_before(node):
                tap = graph.graph.call_module(TAPS, (x, weight))
            tap.meta["val"] = x.meta.get("val")
            node.update_arg(row.data_arg, tap)
    graph.recompile()


def _remove(graph: CapturedGraph) -> None:
    for node in graph.graph.find_nodes(op="call_module", target=TAPS):
        node.replace_all_uses_with(node.args[0])
        graph.graph.erase_node(node)
    if TAPS in graph._modules:
        graph.delete_submodule(TAPS)
    graph.recompile()
