"""Which quantized values only exponentials read: their absolute error becomes the relative error of the result."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx, nn

from qtk.graph.flow import Flow
from qtk.graph.graphs import graphs
from qtk.graph.insert import quantizer_nodes
from qtk.graph.sites import SITE, label
from qtk.operators.lookup import row_of
from qtk.operators.op_row import Precision


def exponent_sites(model: nn.Module, is_large: Callable[[str], bool]) -> list[str]:
    """The names of the sites whose quantized value only exponentials read, and the only sources of these sites.

    Args:
        model: a simulated model, with its quantizers.
        is_large: whether the steps of a site, by its name, are large for the argument of an exponential.
    """
    names: list[str] = []
    for graph in graphs(model).values():
        if not any(_needs(node, Precision.EXPONENT) for node in graph.graph.nodes):
            continue
        flow, found = Flow(graph.graph), set[fx.Node]()
        for node in reversed(quantizer_nodes(graph)):
            readers = [port.user for port in flow.readers(node)]
            name = str(label(node, SITE))
            is_argument = bool(readers) and all(_needs(user, Precision.EXPONENT) for user in readers) and is_large(name)
            if is_argument or (readers and all(_computes(user, found, flow) for user in readers)):
                found.add(node)
                names.append(name)
    return names


def _computes(user: fx.Node, found: set[fx.Node], flow: Flow) -> bool:
    """Says whether a sum or a product is read by ``found`` alone."""
    return _needs(user, Precision.ABSOLUTE) and all(port.user in found for port in flow.readers(user))


def _needs(user: fx.Node, precision: Precision) -> bool:
    row = row_of(user)
    return row is not None and row.precision is precision
