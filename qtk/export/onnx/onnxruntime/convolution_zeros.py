"""Leaves out the zero points of 0 of weights that integer convolutions read; values do not change.

ONNX Runtime's matrix products are integer only if zero points are there; convolutions are in any case, and have many
small weights. Where a convolution stays in float, its DequantizeLinear keeps them: the exact x86 mode
(``session.x64quantprecision=1``, seen in 1.32) makes int8 codes uint8, with one zero point for all channels where none
is stored, and then refuses the scales per channel.
"""

from __future__ import annotations

import onnx_ir as ir

from qtk.export.onnx.node_writer import codes_of, dequantize_of
from qtk.export.onnx.storage_types import limits

RECTIFIERS = ("Relu", "Clip")


def drop_zeros_of_convolutions(graph: ir.Graph) -> None:
    """Rewrites the weights that only such convolutions read. In place."""
    for node in graph:
        if node.op_type != "DequantizeLinear" or len(node.inputs) < 3 or not codes_of(node).is_initializer():
            continue
        zero_point = node.inputs[2]
        constant = None if zero_point is None else zero_point.const_value
        readers = [reader for reader, _ in node.outputs[0].uses()]
        is_zero = constant is not None and not constant.numpy().any()
        if is_zero and readers and all(map(is_integer_convolution, readers)):
            node.resize_inputs(2)


def is_integer_convolution(node: ir.Node) -> bool:
    """Says whether it is a convolution of codes, whose result is rounded to codes of 8 bits."""
    return node.op_type == "Conv" and dequantize_of(node.inputs[0]) is not None and is_rounded(node)


def is_rounded(node: ir.Node) -> bool:
    """Says whether the result of a product is rounded to codes of 8 bits, behind a rectifier maybe, and else unread."""
    readers = [reader for reader, _ in node.outputs[0].uses()]
    while len(readers) == 1 and readers[0].op_type in RECTIFIERS:
        readers = [reader for reader, _ in readers[0].outputs[0].uses()]
    return len(readers) == 1 and readers[0].op_type == "QuantizeLinear" and _is_8_bit(readers[0].outputs[0])


def _is_8_bit(codes: ir.Value) -> bool:
    return codes.dtype is not None and limits(codes.dtype)[1] - limits(codes.dtype)[0] == 255
