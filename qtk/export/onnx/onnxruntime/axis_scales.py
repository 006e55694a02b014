"""Keeps computed values with a scale for each index of an axis out of ONNX Runtime's integer operators.

These take one scale of what is computed: ONNX Runtime (seen in 1.32) fuses DequantizeLinear with the scales of heads
and a product to MatMulIntegerToFloat, and refuses that when it runs, for these are no scales of columns. Such a
DequantizeLinear is read, and such a QuantizeLinear reads, through Max.
"""

from __future__ import annotations

import onnx_ir as ir

from qtk.export.onnx.onnxruntime.max_of_one import max_behind
from qtk.export.onnx.value_names import ValueNames


def keep_axis_scales_float(graph: ir.Graph, names: ValueNames) -> None:
    """Puts Max between every such node and operators, in subgraphs too. In place."""
    for node in list(graph.all_nodes()):
        value, scale = node.inputs[:2] if node.op_type in ("QuantizeLinear", "DequantizeLinear") else (None, None)
        if value is None or scale is None or not scale.shape or not scale.is_initializer():
            continue
        if node.op_type == "QuantizeLinear" and value.producer() is not None:
            max_behind(value, [(node, 0)], names)
        elif node.op_type == "DequantizeLinear" and not value.is_initializer():
            max_behind(node.outputs[0], list(node.outputs[0].uses()), names)
