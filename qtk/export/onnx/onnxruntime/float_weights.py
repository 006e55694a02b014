"""Keeps products with float weights in float in ONNX Runtime, which between codes quantizes the weights itself.

Where the input of a Conv, ConvTranspose, Gemm or MatMul is dequantized, its result quantized and its weight a constant
in float, ONNX Runtime (seen in 1.32) rounds the weight to 8 bits with one scale, and computes in integers.
"""

from __future__ import annotations

import onnx_ir as ir

from qtk.export.onnx.onnxruntime.max_of_one import max_behind
from qtk.export.onnx.onnxruntime.moved_codes import carries_codes
from qtk.export.onnx.value_names import ValueNames

PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")


def keep_float_weights(graph: ir.Graph, names: ValueNames) -> None:
    """Lets products of float constants read what is dequantized through Max, in subgraphs too. In place."""
    for node in list(graph.all_nodes()):
        if node.op_type not in PRODUCTS:
            continue
        left, right = node.inputs[:2]
        for index, (data, weight) in enumerate(((left, right), (right, left))):
            if data is not None and weight is not None and carries_codes(data) and _is_float_constant(weight):
                max_behind(data, [(node, index)], names)


def _is_float_constant(value: ir.Value) -> bool:
    """Whether a value follows from constants, none of which is dequantized."""
    pending = [value]
    while pending:
        each = pending.pop()
        producer = each.producer()
        if producer is None and not (each.is_initializer() or each.const_value is not None):
            return False
        if producer is not None and producer.op_type == "DequantizeLinear":
            return False
        pending += () if producer is None else (source for source in producer.inputs if source is not None)
    return True
