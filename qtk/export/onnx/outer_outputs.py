"""Graphs inside operators that return a value of a graph around them, which ONNX does not allow."""

from __future__ import annotations

import onnx_ir as ir


def return_own_values(graph: ir.Graph) -> None:
    """Puts an Identity in front of each output of an inner graph that is a value of another graph. In place.

    ``IdentityEliminationPass`` leaves such outputs (onnx_ir 1.1). Inputs of the inner graph may be returned.
    """
    for node in graph.all_nodes():
        for inner in (each.as_graph() for each in node.attributes.values() if each.type == ir.AttributeType.GRAPH):
            for index, output in enumerate(inner.outputs):
                producer = output.producer()
                if output in inner.inputs or (producer is not None and producer.graph is inner):
                    continue
                copy = ir.node("Identity", [output])
                copy.outputs[0].name = f"{inner.name}_{output.name}_{index}"
                copy.outputs[0].type, copy.outputs[0].shape = output.type, output.shape
                inner.append(copy)
                inner.outputs[index] = copy.outputs[0]
