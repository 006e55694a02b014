"""Keeps Softmax a float operator in ONNX Runtime, which between codes makes it QLinearSoftmax; values do not change.

QLinearSoftmax divides entries of a table by their sum times 1 / scale rounded down, so that up to a quarter of the
codes are a step off. In ONNX Runtime 1.31 the products overflow where 1 / scale is above e⁵ times the length of the
axis: the largest values, of scores that are near to one another, become 0. The float operator takes no more time.
"""

from __future__ import annotations

import onnx_ir as ir

from qtk.export.onnx.onnxruntime.max_of_one import read_through_max
from qtk.export.onnx.value_names import ValueNames


def keep_softmax_float(graph: ir.Graph, names: ValueNames) -> None:
    """Lets every Softmax of ``graph`` and its subgraphs read dequantized values through Max. In place."""
    for node in list(graph.all_nodes()):
        if node.op_type == "Softmax" and node.inputs[0] is not None:
            read_through_max(node.inputs[0], [(node, 0)], names)
