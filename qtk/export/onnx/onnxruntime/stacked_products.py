"""Writes products with stored stacks of matrices as QLinearMatMul, where both of its sides are codes.

A weight of three or more axes has a scale for each matrix and column, which DequantizeLinear expresses as blocks that
span the summed axis. ONNX Runtime 1.31 fuses MatMul with such a weight; 1.32 leaves it in float, and dequantizes the
whole weight at every run. The operator itself is standard, and takes scales of this form. DequantizeLinear nodes that
nothing else reads leave the file, as ONNX Runtime would run them; readers of the file get them back.
"""

from __future__ import annotations

import json

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from qtk.export.onnx.node_writer import codes_of, dequantize_of, insert_before, value_of
from qtk.export.onnx.qdq_nodes import SITES, qparam_name
from qtk.export.onnx.storage_types import EIGHT_BITS, limits

PRODUCTS = "products"
"""Key in the metadata ``qtk.sites``: name of a QLinearMatMul → names of the DequantizeLinear nodes of its operands."""


def multiply_stacks(model: ir.Model) -> None:
    """Replaces MatMul and the QuantizeLinear behind it, wherever the operator can express both. In place."""
    record = json.loads(model.metadata_props[SITES])
    products = {}
    for node in list(model.graph.all_nodes()):
        if node.op_type == "MatMul" and (operands := _multiply_codes(node, model.graph)) is not None:
            products[node.name] = [operand.name for operand in operands]
    if products:
        model.metadata_props[SITES] = json.dumps({**record, PRODUCTS: products}, separators=(",", ":"))
        RemoveUnusedNodesPass()(model)


def restore_operands(model: ir.Model) -> None:
    """Adds the DequantizeLinear nodes that left the file with ``multiply_stacks``; nothing reads them. In place."""
    products = json.loads(model.metadata_props.get(SITES, "{}")).get(PRODUCTS, {})
    present = {node.name for node in model.graph.all_nodes()}
    for operator in list(model.graph.all_nodes()) if products else ():
        for first, name in zip((0, 3), products.get(operator.name, ()), strict=False):
            if name not in present:
                present.add(name)
                insert_before(operator, _dequantize(operator.inputs[first:first + 3], name))


def _multiply_codes(product: ir.Node, graph: ir.Graph) -> tuple[ir.Node, ir.Node] | None:
    """The nodes that dequantized the operands of ``product``, if it has been replaced."""
    left, right, quantize = dequantize_of(product.inputs[0]), _stack(product.inputs[1]), _quantize(product.outputs[0])
    if left is None or right is None or quantize is None:
        return None
    given, stored, made = (value.dtype for value in (codes_of(left), codes_of(right), quantize.outputs[0]))
    fitting = EIGHT_BITS if given == ir.DataType.UINT8 else (given,)
    if given not in EIGHT_BITS or made != given or stored not in fitting:
        return None
    operator = ir.Node(
        "", "QLinearMatMul", [*left.inputs, *right.inputs[:2], _zero_point(right, graph), *quantize.inputs[1:]],
        num_outputs=1, name=product.name,
    )
    insert_before(product, operator)
    result, codes = operator.outputs[0], quantize.outputs[0]
    result.name, result.type, result.shape = codes.name, codes.type, codes.shape
    codes.replace_all_uses_with(result, replace_graph_outputs=True)
    return left, right


def _stack(value: ir.Value | None) -> ir.Node | None:
    """The DequantizeLinear of a stored weight of three or more axes with a scale for each matrix and column."""
    node = None if value is None else value.producer()
    if node is None or node.op_type != "DequantizeLinear" or "block_size" not in node.attributes:
        return None
    codes = codes_of(node)
    if not codes.is_initializer() or codes.shape is None or len(codes.shape) < 3:
        return None
    summed = len(codes.shape) - 2
    along = node.attributes["axis"].as_int() % len(codes.shape)
    return node if along == summed and node.attributes["block_size"].as_int() == codes.shape[summed] else None


def _quantize(value: ir.Value) -> ir.Node | None:
    """The QuantizeLinear with one scale that alone reads ``value``, behind a ReLU whose zeros are its lowest code."""
    readers = [reader for reader, _ in value.uses()]
    if len(readers) != 1 or value.is_graph_output():
        return None
    (reader,) = readers
    if reader.op_type == "Relu":
        quantize = _quantize(reader.outputs[0])
        return quantize if quantize is not None and _clips_at_zero(quantize) else None
    scale = reader.inputs[1] if reader.op_type == "QuantizeLinear" else None
    return reader if scale is not None and scale.shape is not None and len(scale.shape) == 0 else None


def _clips_at_zero(quantize: ir.Node) -> bool:
    zero_point = quantize.inputs[2].const_value if len(quantize.inputs) > 2 and quantize.inputs[2] else None
    return zero_point is not None and zero_point.numpy().min() == limits(zero_point.dtype)[0]


def _zero_point(dequantize: ir.Node, graph: ir.Graph) -> ir.Value:
    """The zero point of a stored weight, or the 0 that a symmetric weight does not store."""
    if len(dequantize.inputs) > 2 and dequantize.inputs[2] is not None:
        return dequantize.inputs[2]
    codes = codes_of(dequantize)
    name = qparam_name(codes.name or "", "zero_point")
    if name not in graph.initializers:
        assert codes.dtype is not None
        tensor = ir.tensor(np.zeros((), codes.dtype.numpy()), name=name)
        graph.register_initializer(ir.Value(name=name, type=codes.type, shape=ir.Shape(()), const_value=tensor))
    return graph.initializers[name]


def _dequantize(operand: tuple[ir.Value | None, ...] | list[ir.Value | None], name: str) -> ir.Node:
    """A DequantizeLinear of an operand of QLinearMatMul: codes, scale and zero point."""
    codes, scale, zero_point = operand
    assert codes is not None
    assert scale is not None
    attributes, inputs = [], [codes, scale, zero_point]
    if codes.is_initializer():
        assert codes.shape is not None
        rank, summed = len(codes.shape), codes.shape[-2]
        attributes = [ir.AttrInt64("axis", rank - 2), ir.AttrInt64("block_size", int(summed))]
        if zero_point is not None and zero_point.shape is not None and len(zero_point.shape) == 0:
            inputs.pop()
    node = ir.Node("", "DequantizeLinear", inputs, attributes, outputs=[value_of(ir.DataType.FLOAT, codes.shape)])
    node.name, node.outputs[0].name = name, f"{name}/float"
    return node
