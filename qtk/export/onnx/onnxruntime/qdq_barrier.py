"""Max of one input returns it, and ends what ONNX Runtime carries a DequantizeLinear through (seen in 1.31 and 1.32).

Identity, Reshape and local functions do not: they are removed, carried through, or written out first. It stands where
ONNX Runtime would compute in integers what it should not; values do not change. The cases:

1. Softmax between codes becomes QLinearSoftmax, which divides entries of a table by their sum times 1 / scale rounded
   down, so that up to a quarter of the codes are a step off. In 1.31 the products overflow where 1 / scale is above e⁵
   times the length of the axis: the largest values, of scores that are near to one another, become 0. The float
   operator takes no more time.
2. Of a Conv, ConvTranspose, Gemm or MatMul whose input is dequantized, whose result is quantized and whose weight is a
   constant in float, the weight is rounded to 8 bits with one scale (1.32).
3. Of a Conv, ConvTranspose or Gemm whose input and weight are dequantized and whose result is quantized, a float bias
   is rounded to int32 in the scale of the products (1.32), as integer kernels need it: of 8-bit codes. Of other ones
   there are no such kernels, and it is rounded all the same. In 4 bits a step of the products is 1/57 of a step of the
   result. A MatMul of two axes, or of fixed lengths, and the Add of a bias are made a Gemm before.
4. Computed values with a scale for each index of an axis: integer operators take one scale of what is computed.
   DequantizeLinear with the scales of heads and a product become MatMulIntegerToFloat, which is refused when it runs,
   for these are no scales of columns (1.32).
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from qtk.core.free_name import free_name
from qtk.export.onnx.names import ValueNames
from qtk.export.onnx.node_writer import codes_of, value_of
from qtk.export.onnx.onnxruntime.moved_codes import FOLLOWED, carries_codes
from qtk.export.onnx.storage_types import EIGHT_BITS

WITH_BIAS = ("Conv", "ConvTranspose", "Gemm")
PRODUCTS = (*WITH_BIAS, "MatMul")


def insert_barrier(x: ir.Value, reads: Iterable[tuple[ir.Node, int]], names: ValueNames) -> None:
    """Lets nodes, each at the index of one of its inputs, read ``x`` through Max, if ``x`` is dequantized. In place."""
    if carries_codes(x):
        max_behind(x, reads, names)


def max_behind(x: ir.Value, reads: Iterable[tuple[ir.Node, int]], names: ValueNames) -> None:
    """Lets nodes, each at the index of one of its inputs, read ``x``, made by a node, through Max. In place."""
    same = ir.node("Max", [x], outputs=[value_of(x.dtype, x.shape)])
    names.give(same.outputs[0], names.free(f"{x.name}/Max"))
    producer = x.producer()
    assert producer is not None
    assert producer.graph is not None
    same.name = free_name(str(same.outputs[0].name), {node.name for node in producer.graph})
    producer.graph.insert_after(producer, same)
    for reader, index in reads:
        reader.replace_input_with(index, same.outputs[0])


def keep_softmax_float(graph: ir.Graph, names: ValueNames) -> None:
    """Lets every Softmax of ``graph`` and its subgraphs read dequantized values through Max (case 1). In place."""
    for node in list(graph.all_nodes()):
        if node.op_type == "Softmax" and node.inputs[0] is not None:
            insert_barrier(node.inputs[0], [(node, 0)], names)


def keep_float_weights(graph: ir.Graph, names: ValueNames) -> None:
    """Lets products of float constants read what is dequantized through Max, in subgraphs too (case 2). In place."""
    for node in list(graph.all_nodes()):
        if node.op_type not in PRODUCTS:
            continue
        left, right = node.inputs[:2]
        for index, (data, weight) in enumerate(((left, right), (right, left))):
            if data is not None and weight is not None and carries_codes(data) and _is_float_constant(weight):
                max_behind(data, [(node, index)], names)


def _is_float_constant(value: ir.Value) -> bool:
    """Says whether a value follows from constants, none of which is dequantized."""
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


def keep_float_biases(graph: ir.Graph, names: ValueNames) -> None:
    """Lets products with a float bias that have no integer kernel read their input through Max (case 3). In place."""
    for node in list(graph.all_nodes()):
        bias = _bias(node)
        if bias is None or not bias.is_initializer():
            continue
        types = [_type_of_codes(value) for value in node.inputs[:2]]
        data = node.inputs[0]
        if data is not None and None not in types and not all(each in EIGHT_BITS for each in types):
            insert_barrier(data, [(node, 0)], names)


def _bias(node: ir.Node) -> ir.Value | None:
    """Returns what is added to a product, also where ONNX Runtime makes one op of product and sum."""
    if node.op_type in WITH_BIAS:
        return node.inputs[2] if len(node.inputs) > 2 else None
    readers, shape = list(node.outputs[0].uses()), node.outputs[0].shape
    if node.op_type != "MatMul" or len(readers) != 1 or shape is None or not (len(shape) == 2 or shape.is_static()):
        return None
    reader, index = readers[0]
    return reader.inputs[1 - index] if reader.op_type == "Add" else None


def _type_of_codes(value: ir.Value | None) -> ir.DataType | None:
    """The type of the codes that a value is dequantized from, and moved; ``None`` if it is not."""
    producer = None if value is None else value.producer()
    while producer is not None and producer.op_type in FOLLOWED:
        value = producer.inputs[0]
        producer = None if value is None else value.producer()
    if producer is None or producer.op_type != "DequantizeLinear":
        return None
    return codes_of(producer).dtype


def keep_axis_scales_float(graph: ir.Graph, names: ValueNames) -> None:
    """Puts Max between quantizers with scales of an axis and operators, in subgraphs too (case 4). In place."""
    for node in list(graph.all_nodes()):
        value, scale = node.inputs[:2] if node.op_type in ("QuantizeLinear", "DequantizeLinear") else (None, None)
        if value is None or scale is None or not scale.shape or not scale.is_initializer():
            continue
        if node.op_type == "QuantizeLinear" and value.producer() is not None:
            max_behind(value, [(node, 0)], names)
        elif node.op_type == "DequantizeLinear" and not value.is_initializer():
            max_behind(node.outputs[0], list(node.outputs[0].uses()), names)
