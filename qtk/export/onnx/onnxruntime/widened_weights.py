"""Lets integer convolutions and Gemms read weights of 4 bits as codes of 8 bits; values and stored codes do not change.

ONNX Runtime (seen in 1.32) has no integer kernels of 4-bit weights with 8-bit inputs: it dequantizes the weight at
every run and multiplies floats. A Cast of the stored codes is computed once, when the file is loaded; the file keeps 4
bits a weight, a session takes 8. resnet18, one row: 57.8 → 10.1 ms, 33.9 in float.
"""

from __future__ import annotations

import onnx_ir as ir

from qtk.export.onnx.names import ValueNames
from qtk.export.onnx.node_writer import NodeWriter, codes_of, dequantize_of
from qtk.export.onnx.onnxruntime.convolution_zeros import is_rounded
from qtk.export.onnx.storage_types import EIGHT_BITS

WIDER = {ir.DataType.INT4: ir.DataType.INT8, ir.DataType.UINT4: ir.DataType.UINT8,
         ir.DataType.INT2: ir.DataType.INT8, ir.DataType.UINT2: ir.DataType.UINT8}


def widen_weights(graph: ir.Graph, names: ValueNames) -> None:
    """Casts the codes of every weight that such operators alone read. In place."""
    for node in list(graph):
        if node.op_type != "DequantizeLinear" or "block_size" in node.attributes:
            continue
        codes, readers = codes_of(node), node.outputs[0].uses()
        if not codes.is_initializer() or codes.dtype not in WIDER or node.outputs[0].is_graph_output():
            continue
        if readers and all(index == 1 and _is_integer(reader) for reader, index in readers):
            writer = NodeWriter(graph, node, str(node.name), codes.shape)
            node.replace_input_with(0, writer.cast(codes, WIDER[codes.dtype]))
            zero_point = node.inputs[2] if len(node.inputs) > 2 else None
            if zero_point is not None and zero_point.dtype in WIDER:
                node.replace_input_with(2, writer.cast(zero_point, WIDER[zero_point.dtype]))


def _is_integer(node: ir.Node) -> bool:
    """Says whether it is a Gemm, or a convolution whose result is rounded, of 8-bit codes, its bias of codes or none.

    ONNX Runtime's QGemm may write floats, its QLinearConv writes codes.
    """
    data = dequantize_of(node.inputs[0])
    if data is None or codes_of(data).is_initializer() or codes_of(data).dtype not in EIGHT_BITS:
        return False
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    producer = None if bias is None else bias.producer()
    if bias is not None and (producer is None or producer.op_type != "DequantizeLinear"):
        return False
    return node.op_type == "Gemm" or (node.op_type == "Conv" and is_rounded(node))
