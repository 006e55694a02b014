"""Finds products of stored weights with floats, whose inputs ONNX Runtime rounds where nobody asked for it.

ONNX Runtime (seen in 1.31) fuses the product of a float and a dequantized weight into MatMulNBits, and unless the
session says ``session.qdq_matmulnbits_accuracy_level=1`` rounds the float to 8 bits in blocks: errors near 1 %.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from qtk.capture.composites import composite_called
from qtk.export.simulated_sites import simulated_sites
from qtk.graph.flow import Flow, maker
from qtk.graph.graphs import nested_graphs, with_nested
from qtk.graph.insert import quantizer_called
from qtk.nn.recurrent import Recurrent
from qtk.operators.op_row import Product


def weights_of_floats(model: fx.GraphModule, *, contrib_operators: bool = False) -> list[str]:
    """The sites of the weights of linear layers and matrix products that are multiplied with values in float.

    Args:
        model: the simulation.
        contrib_operators: as for ``qdq.export``: cells of recurrent nets are one operator then, too.
    """
    constants = {site.node: site.name for site in simulated_sites(model) if site.constant is not None}
    names = (name for graph in with_nested(model) for name in _in_graph(graph, constants, contrib_operators))
    return list(dict.fromkeys(names))


def _in_graph(graph: fx.GraphModule, constants: dict[fx.Node, str], contrib_operators: bool) -> Iterator[str]:
    flow = Flow(graph.graph)
    for node, name in constants.items():
        if node.graph is not graph.graph:
            continue
        for port in flow.readers(node):
            row = flow.row(port.user) if port.user.op != "output" else None
            if row is None or row.product not in (Product.OUT_IN, Product.IN_OUT) or port.arg not in row.weights:
                continue
            composite = composite_called(port.user)
            if isinstance(composite, Recurrent) or (contrib_operators and composite is not None):
                continue  # one operator, or a loop, whose weights are dequantized when the file is loaded
            if not all(_is_quantized(flow, data.value) for data in flow.data_ports(port.user)):
                yield name


def _is_quantized(flow: Flow, value: fx.Node) -> bool:
    """Says whether a value is codes, moved: of a quantizer, or of an attention whose results are quantized inside."""
    root = flow.root(value)
    if quantizer_called(root) is not None:
        return True
    inside = [graph.graph for graph in nested_graphs(maker(root)).values()]
    flows = {graph: Flow(graph) for graph in inside}
    results = [(flows[graph], each) for graph in inside for each in graph.output_node().all_input_nodes]
    return bool(results) and all(quantizer_called(within.root(each)) is not None for within, each in results)
