"""Quantizes int8 values on both sides of data movement, so that ONNX Runtime has nothing to add there.

ONNX Runtime (seen in 1.31) moves QuantizeLinear and DequantizeLinear through data movement, and since opset 21 writes
the type of the codes into nodes that it adds; where it then makes int8 values uint8, as on x86, it refuses its own
graph: "output_dtype INT8 does not match y_zero_point type UINT8". Quantizing a dequantized value again gives the same
codes, so values do not change. The cases:

1. A dequantized value is moved: it is quantized and dequantized again behind the movement.
2. A value is moved and then quantized: it is quantized and dequantized before the movement as well.
"""

from __future__ import annotations

import onnx_ir as ir

from qtk.export.onnx.names import ValueNames
from qtk.export.onnx.node_writer import insert_before, value_of
from qtk.export.onnx.onnxruntime.moved_codes import CARRIED


def quantize_around_movement(graph: ir.Graph, names: ValueNames) -> None:
    """Rewrites ``graph`` and its subgraphs. In place."""
    nodes = [node for node in graph.all_nodes() if node.op_type in CARRIED]
    for node in nodes:
        dequantize = _int8_dequantize(node.inputs[0])
        if dequantize is not None and not _is_constant(dequantize):
            _requantize_result(node, dequantize, names)
    for node in reversed(nodes):
        dequantize = _int8_dequantized(node.outputs[0])
        value = node.inputs[0]
        if dequantize is not None and value is not None and _int8_dequantize(value) is None:
            node.replace_input_with(0, _requantized(value, dequantize, node, names))


def _requantize_result(node: ir.Node, dequantize: ir.Node, names: ValueNames) -> None:
    """Case 1."""
    value = node.outputs[0]
    readers = [(reader, index) for reader, index in value.uses() if reader.op_type != "QuantizeLinear"]
    if not readers and not value.is_graph_output():
        return
    assert node.graph is not None
    following = ir.node("Identity", [value], outputs=[value_of(value.dtype, value.shape)])
    node.graph.insert_after(node, following)
    result = _requantized(value, dequantize, following, names)
    node.graph.remove(following, safe=True)
    for reader, index in readers:
        reader.replace_input_with(index, result)
    outputs = node.graph.outputs
    for index, output in enumerate(outputs):
        if output is value:
            assert value.name is not None
            outputs[index] = result
            names.give(result, value.name)


def _requantized(value: ir.Value, dequantize: ir.Node, before: ir.Node, names: ValueNames) -> ir.Value:
    """``value``, quantized and dequantized like by ``dequantize`` in front of ``before``."""
    codes = dequantize.inputs[0]
    assert codes is not None
    scale_and_zero_point = dequantize.inputs[1:]
    quantize = ir.node("QuantizeLinear", [value, *scale_and_zero_point], outputs=[value_of(codes.dtype, value.shape)])
    again = ir.node(
        "DequantizeLinear", [quantize.outputs[0], *scale_and_zero_point], outputs=[value_of(value.dtype, value.shape)],
        metadata_props=dict(dequantize.metadata_props),
    )
    for node in (quantize, again):
        names.give(node.outputs[0], names.free(f"{value.name}/{node.op_type}"))
        node.name = node.outputs[0].name
        insert_before(before, node)
    return again.outputs[0]


def _int8_dequantize(value: ir.Value | None) -> ir.Node | None:
    """The DequantizeLinear that makes ``value`` of int8 codes with one calibrated scale; else ``None``."""
    producer = None if value is None else value.producer()
    if producer is None or producer.op_type != "DequantizeLinear" or len(producer.inputs) < 3:
        return None
    scale, zero_point = producer.inputs[1:]
    if scale is None or zero_point is None or not (scale.is_initializer() and zero_point.is_initializer()):
        return None
    return producer if zero_point.dtype == ir.DataType.INT8 and not zero_point.shape else None


def _int8_dequantized(value: ir.Value) -> ir.Node | None:
    """The DequantizeLinear of the codes, int8 with one scale, that alone are made of ``value``; else ``None``."""
    readers = [reader for reader, _ in value.uses()]
    if len(readers) != 1 or readers[0].op_type != "QuantizeLinear" or value.is_graph_output():
        return None
    found = (_int8_dequantize(reader.outputs[0]) for reader, _ in readers[0].outputs[0].uses() if reader.outputs)
    return next((dequantize for dequantize in found if dequantize is not None), None)


def _is_constant(dequantize: ir.Node) -> bool:
    codes = dequantize.inputs[0]
    return codes is not None and codes.is_initializer()
