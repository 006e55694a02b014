"""Lets ONNX Runtime dequantize weights that float operators read when it loads a file, and not at every run.

LSTM, GRU and RNN compute in float, and prepare constant weights for their products once; float cells in a Scan fail at
dequantized ones; embeddings would dequantize the whole table to look up a few rows; a table of position biases is
gathered, and a mask added to scores in float, at every run. ONNX Runtime (seen in 1.31)
computes what follows from constants in advance, but DequantizeLinear never. So these weights are dequantized by a
function of the file, ``qtk::DequantizeLinear``, that has the inputs of the operator of this name and is written out as
(codes − zero point) · scale. Files stay small; a session takes as much memory as with the float model.
"""

from __future__ import annotations

import onnx_ir as ir

from qtk.export.onnx.node_writer import codes_of

DOMAIN = "qtk"

FLOAT_OPERATORS = ("LSTM", "GRU", "RNN", "Gather", "GatherND")

ELEMENTWISE = ("Add", "Sub", "Mul")
"""Operators that are integer between DequantizeLinear and QuantizeLinear only."""

LOOPS = ("Scan", "Loop", "If")
"""Operators with bodies; in one in which nothing is quantized all operators are float."""

QUANTIZING = ("QuantizeLinear", "DynamicQuantizeLinear")

ARRANGING = ("Slice", "Concat", "Unsqueeze", "Squeeze", "Reshape", "Transpose", "Identity")
"""Operators that rearrange the weights of a layer for an ONNX operator whose gates have another order."""


def dequantize_when_loaded(model: ir.Model, *, opset: int) -> None:
    """Calls the function for every stored tensor that only such operators read. In place."""
    dequantized = [
        node for node in model.graph.all_nodes()
        if node.op_type == "DequantizeLinear" and _fits_function(node)
        and _only_for_float(node.outputs[0], model.graph)
    ]
    for node in dequantized:
        node.domain = DOMAIN
    if dequantized:
        function = _function(opset)
        model.functions[function.identifier()] = function
        model.opset_imports[DOMAIN] = 1


def _fits_function(dequantize: ir.Node) -> bool:
    """Says whether it reads stored codes of two axes or more with one scale, or a matrix with one for each row."""
    codes, axis = codes_of(dequantize), dequantize.attributes.get("axis")
    if not codes.is_initializer() or codes.shape is None or len(dequantize.inputs) < 3:
        return False
    by_row = axis is not None and axis.as_int() == 0 and len(codes.shape) == 2
    return (axis is None or by_row) and len(codes.shape) >= 2 and "block_size" not in dequantize.attributes


def _only_for_float(value: ir.Value, graph: ir.Graph) -> bool:
    readers = [reader for reader, _ in value.uses()]
    return bool(readers) and not value.is_graph_output() and all(
        reader.op_type in FLOAT_OPERATORS
        or (reader.op_type in ELEMENTWISE and _computes_in_float(reader, value))
        or _is_in_float_body(reader, graph)
        or (reader.op_type in ARRANGING and _only_for_float(reader.outputs[0], graph))
        for reader in readers
    )


def _computes_in_float(node: ir.Node, constant: ir.Value) -> bool:
    """Says whether an elementwise operator has an operand or a result that is not quantized."""
    others = [value for value in node.inputs if value is not constant]
    return not all(_is_dequantized(value) for value in others) or not _is_quantized(node.outputs[0])


def _is_dequantized(value: ir.Value | None) -> bool:
    producer = None if value is None else value.producer()
    if producer is not None and producer.op_type in (*ARRANGING, "Split"):
        return _is_dequantized(producer.inputs[0])
    return producer is not None and producer.op_type == "DequantizeLinear"


def _is_quantized(value: ir.Value) -> bool:
    """Says whether a reader quantizes a value, possibly behind a rectifier."""
    return any(
        reader.op_type in QUANTIZING
        or (reader.op_type in (*ARRANGING, "Relu", "Clip") and _is_quantized(reader.outputs[0]))
        for reader, _ in value.uses()
    )


def _is_in_float_body(node: ir.Node, graph: ir.Graph) -> bool:
    """Says whether a node is in the body of a loop in which nothing is quantized."""
    body = node.graph
    return body is not None and body is not graph and not any(each.op_type in QUANTIZING for each in body)


def _function(opset: int) -> ir.Function:
    codes, scale, zero_point = (ir.Value(name=name) for name in ("codes", "scale", "zero_point"))
    column = ir.node("Constant", [], {"value_ints": [-1, 1]})
    to_float = {"to": int(ir.DataType.FLOAT)}
    reals, zeros = ir.node("Cast", [codes], to_float), ir.node("Cast", [zero_point], to_float)
    by_row = [ir.node("Reshape", [value, column.outputs[0]]) for value in (zeros.outputs[0], scale)]
    difference = ir.node("Sub", [reals.outputs[0], by_row[0].outputs[0]])
    product = ir.node("Mul", [difference.outputs[0], by_row[1].outputs[0]])
    nodes = [column, reals, zeros, *by_row, difference, product]
    for index, node in enumerate(nodes):
        node.outputs[0].name = node.name = f"{node.op_type}_{index}"
    graph = ir.Graph([codes, scale, zero_point], [product.outputs[0]], nodes=nodes, opset_imports={"": opset})
    return ir.Function(DOMAIN, "DequantizeLinear", graph=graph, attributes=[ir.AttrInt64("axis", 0)])
