"""Taps on the inputs of weighted ops inside modules that are run as a whole: loops over time, a model's own Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TypeAlias

from torch import Tensor, fx, nn

from qtk.graph.captured_graph import CapturedGraph
from qtk.graph.graphs import graphs
from qtk.moments.matrix_rows import MatrixRows
from qtk.moments.stack_use import StackUse
from qtk.nn.tap import Tap
from qtk.operators.lookup import row_of

TAPS = "qtk_taps"
"""The submodule of a graph that holds its taps."""

Listener: TypeAlias = Callable[[Tensor | MatrixRows, Tensor, fx.Node | None], None]
"""A function called with input and weight at every call of a tapped op, and with the op if it is one of ``uses``."""


@contextmanager
def input_taps(
    module: nn.Module, listener: Listener, uses: Mapping[fx.Node, StackUse] = MappingProxyType({}), *,
    only_uses: bool = False,
) -> Iterator[None]:
    """Taps every weighted op in the graphs inside ``module`` while the body runs.

    Args:
        module: the module.
        listener: is called with the inputs.
        uses: ops that multiply their weight in another way, of which the listener is given the rows of each matrix.
        only_uses: tap no others.
    """
    tapped: list[CapturedGraph] = []
    try:
        for graph in graphs(module).values():
            tapped.append(graph)
            tap = _InputTap(listener, [use for op, use in uses.items() if op.graph is graph.graph])
            _add(graph, tap, uses, only_uses=only_uses)
        yield
    finally:
        for graph in tapped:
            _remove(graph)


class _InputTap(Tap):
    def __init__(self, listener: Listener, uses: Iterable[StackUse]) -> None:
        super().__init__()
        self._listener = listener
        self._uses = {use.op.name: use for use in uses}

    @property
    def idle(self) -> bool:
        return False

    def forward(self, x: Tensor, weight: Tensor, op: str = "", reads: Sequence[object] = ()) -> Tensor:
        """Shape: any; result ``x``.

        Args:
            x: the input of an op.
            weight: its weight, before it is moved.
            op: the name of the op, if it multiplies the weight in a way of its own.
            reads: the values of what ``StackUse.rows`` reads.
        """
        use = self._uses.get(op)
        if use is None:
            self._listener(x, weight, None)
        else:
            values = dict(zip(use.reads, reads, strict=True))
            self._listener(x if use.is_plain else use.rows(values.__getitem__), weight, use.op)
        return x


def _add(graph: CapturedGraph, tap: _InputTap, uses: Mapping[fx.Node, StackUse], *, only_uses: bool) -> None:
    for node in list(graph.graph.nodes):
        arguments: tuple[object, ...] | None = None
        if (use := uses.get(node)) is not None:
            x: object = use.data
            arguments = (use.data, use.root, node.name, use.reads)
        else:
            row = row_of(node)
            if only_uses or row is None or not row.weights or node.op != "call_function" or row.data_arg is None:
                continue
            x, weight = node.args[row.data_arg], node.args[row.weights[-1]]
            if isinstance(x, fx.Node) and isinstance(weight, fx.Node) and x is not weight:
                arguments = (x, weight)
        if arguments is not None and isinstance(x, fx.Node):
            if not hasattr(graph, TAPS):
                graph.add_module(TAPS, tap)
            with graph.graph.inserting_before(node):
                call = graph.graph.call_module(TAPS, arguments)  # type: ignore[arg-type]
            call.meta["val"] = x.meta.get("val")
            node.replace_input_with(x, call)
    graph.recompile()


def _remove(graph: CapturedGraph) -> None:
    for node in graph.graph.find_nodes(op="call_module", target=TAPS):
        node.replace_all_uses_with(node.args[0])
        graph.graph.erase_node(node)
    if TAPS in graph._modules:
        graph.delete_submodule(TAPS)
    graph.recompile()
