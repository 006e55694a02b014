"""Keeps products with float weights in float in ONNX Runtime, which between codes quantizes the weights itself.

Where the input of a Conv, ConvTranspose, Gemm or MatMul is dequantized, its result quantized and its weight a constant
in float, ONNX Runtime (seen in 1.32) rounds the weight to 8 bits with one scale, and computes in integers.
"""

from __future__ import annotations

import onnx_ir as ir

from qtk.export.onnx.onnxruntime.max_of_one import read_through_max
from qtk.export.onnx.value_names import ValueNames

PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")


def keep_float_weights(graph: ir.Graph, names: ValueNames) -> None:
    """Lets products of float constants read what is dequantized through Max, in subgraphs too. In place."""
    for node in list(graph.all_nodes()):
        if node.op_type not in PRODUCTS:
            continue
        left, right = node.inputs[:2]
        for index, (data, weight) in enumerate(((left, right), (right, left))):
            if data is not None and weight is not None and _is_float_constant(weight):
                read_through_max(data, [(node, index)], names)


def _is_float_constant(value: ir.Value) -> bool:
    """Whether a value follows from constants, none of which is dequantized."""
    producer = value.producer()
    if producer is None:
        return value.is_initializer() or value.const_value is not None
    if producer.op_type == "DequantizeLinear":
        return False
    return all(each is None or _is_float_constant(each) for each in producer.inputs)
