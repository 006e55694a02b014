"""Keeps biases in float where ONNX Runtime computes the product in float.

Where input and weight of a Conv, ConvTranspose or Gemm are dequantized and its result is quantized, ONNX Runtime (seen
in 1.32) rounds a float bias to int32 in the scale of the products, as its integer kernels need it: of 8-bit codes. Of
other ones it has no such kernels, and rounds all the same. In 4 bits a step of the products is 1/57 of a step of the
result.
"""

from __future__ import annotations

import onnx_ir as ir

from qtk.export.onnx.dequantize_nodes import codes_of
from qtk.export.onnx.onnxruntime.max_of_one import read_through_max
from qtk.export.onnx.onnxruntime.moved_codes import FOLLOWED
from qtk.export.onnx.value_names import ValueNames

PRODUCTS = ("Conv", "ConvTranspose", "Gemm")
EIGHT_BITS = frozenset((ir.DataType.INT8, ir.DataType.UINT8))


def keep_float_biases(graph: ir.Graph, names: ValueNames) -> None:
    """Lets products with a float bias that have no integer kernel read their input through Max, in subgraphs too.

    In place.
    """
    for node in list(graph.all_nodes()):
        if node.op_type not in PRODUCTS or len(node.inputs) < 3:
            continue
        data, weight, bias = node.inputs[:3]
        types = [_type_of_codes(value) for value in (data, weight)]
        if data is not None and bias is not None and bias.is_initializer() and None not in types and not (
            EIGHT_BITS.issuperset(types)
        ):
            read_through_max(data, [(node, 0)], names)


def _type_of_codes(value: ir.Value | None) -> ir.DataType | None:
    """The type of the codes that a value is dequantized from, and moved; ``None`` if it is not."""
    producer = None if value is None else value.producer()
    while producer is not None and producer.op_type in FOLLOWED:
        value = producer.inputs[0]
        producer = None if value is None else value.producer()
    if producer is None or producer.op_type != "DequantizeLinear":
        return None
    return codes_of(producer).dtype
