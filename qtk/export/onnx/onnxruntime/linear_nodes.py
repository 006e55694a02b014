"""Writes products with stored weights in the form that ONNX Runtime fuses into integer kernels; values do not change.

1. A Gemm that reads a stored weight and a float, or a dynamically quantized value, becomes MatMul and Add: of the two
   only MatMul is fused (seen in ONNX Runtime 1.31), into DynamicQuantizeMatMul or MatMulNBits.
2. A bias added to a product of two axes, or of fixed lengths, with a dynamically quantized value is negated and
   subtracted: ONNX Runtime would make a Gemm of MatMul and Add before it looks for integers.
3. A weight in blocks that is transposed before it is read is stored transposed: ONNX Runtime transposes stored codes
   by itself, but not weights in blocks.
"""

from __future__ import annotations

import json

import numpy as np
import onnx_ir as ir

from qtk.export.onnx.names import ValueNames, op_of
from qtk.export.onnx.node_writer import insert_before, value_of

PERMUTATION = "permutation"
"""Metadata key of a DequantizeLinear until the file is complete: the axes of the site, in the order of its codes."""


def fuse_linear_layers(graph: ir.Graph, names: ValueNames) -> None:
    """Rewrites every Gemm and every stored weight of ``graph`` and its subgraphs. In place."""
    for node in list(graph.all_nodes()):
        if node.op_type == "Gemm" and _needs_matmul(node):
            _to_matmul(node, names)
    for node in list(graph.all_nodes()):
        if node.op_type == "Add":
            _subtract_bias(node, names)
    for node in list(graph.all_nodes()):
        if node.op_type == "DequantizeLinear" and "block_size" in node.attributes and _is_stored(node):
            _store_transposed(node, graph)


def _needs_matmul(gemm: ir.Node) -> bool:
    """Case 1, of the Gemms that compute A B + C or A Bᵀ + C."""
    left, right = gemm.inputs[:2]
    plain = [_number(gemm, "transA", 0) == 0, _number(gemm, "alpha", 1) == 1, _number(gemm, "beta", 1) == 1]
    weight, source = (None if value is None else value.producer() for value in (right, left))
    if not all(plain) or weight is None or weight.op_type != "DequantizeLinear" or not _is_stored(weight):
        return False
    return source is None or source.op_type != "DequantizeLinear" or _is_dynamic(source)


def _to_matmul(gemm: ir.Node, names: ValueNames) -> None:
    left, right, *bias = gemm.inputs
    result = gemm.outputs[0]
    assert right is not None
    if _number(gemm, "transB", 0):
        right = inserted(gemm, "Transpose", [right], ir.Shape(tuple(right.shape or ())[::-1]), names,
                        [ir.AttrInt64s("perm", [1, 0])])
    product = inserted(gemm, "MatMul", [left, right], result.shape, names)
    if bias and bias[0] is not None:
        product = inserted(gemm, "Add", [product, bias[0]], result.shape, names)
    replace_by(gemm, product, names)


def _subtract_bias(add: ir.Node, names: ValueNames) -> None:
    """Case 2."""
    for index, value in enumerate(add.inputs):
        product = None if value is None else value.producer()
        bias = add.inputs[1 - index]
        if product is not None and bias is not None and _becomes_gemm(product, add.outputs[0].shape):
            negated = inserted(add, "Neg", [bias], bias.shape, names)
            difference = inserted(add, "Sub", [value, negated], add.outputs[0].shape, names)
            replace_by(add, difference, names)
            return


def _becomes_gemm(product: ir.Node, shape: ir.Shape | None) -> bool:
    """Says whether a product of dynamically quantized values and a stored weight becomes a Gemm with its Add."""
    if product.op_type != "MatMul" or len(product.outputs[0].uses()) > 1:
        return False
    left, right = (_before_transpose(value) for value in product.inputs)
    if left is None or right is None or {left.op_type, right.op_type} != {"DequantizeLinear"}:
        return False
    fixed = shape is not None and (len(shape) == 2 or shape.is_static())
    return fixed and _is_dynamic(left) and _is_stored(right)


def _before_transpose(value: ir.Value | None) -> ir.Node | None:
    """The node that makes ``value``, or what it transposes."""
    producer = None if value is None else value.producer()
    if producer is not None and producer.op_type == "Transpose":
        return _before_transpose(producer.inputs[0])
    return producer


def replace_by(node: ir.Node, value: ir.Value, names: ValueNames) -> None:
    """Removes a node whose result ``value`` is to be instead, under the name of the result."""
    name = node.outputs[0].name
    node.outputs[0].replace_all_uses_with(value, replace_graph_outputs=True)
    assert node.graph is not None
    assert name is not None
    node.graph.remove(node, safe=True)
    names.give(value, name)


def inserted(
    before: ir.Node, op: str, inputs: list[ir.Value | None], shape: ir.Shape | None, names: ValueNames,
    attributes: list[ir.Attr] | None = None,
) -> ir.Value:
    """The result of a new node of the same op in front of another one, named after it."""
    result = value_of(before.outputs[0].dtype, shape)
    node = ir.Node("", op, inputs, attributes or [], outputs=[result])
    names.give(result, names.free(f"{before.outputs[0].name}/{op}"))
    owner = op_of(before.name or "")
    node.name = result.name if owner is None or result.name is None else f"{owner}/{result.name.replace('/', '.')}"
    insert_before(before, node)
    return result


def _store_transposed(dequantize: ir.Node, graph: ir.Graph) -> None:
    """Case 3, if every reader is the same Transpose."""
    readers = [reader for reader, _ in dequantize.outputs[0].uses()]
    permutations = {tuple(r.attributes["perm"].as_ints()) if r.op_type == "Transpose" else None for r in readers}
    if len(permutations) != 1 or None in permutations or dequantize.outputs[0].is_graph_output():
        return
    (permutation,) = permutations
    assert permutation is not None
    for index, value in enumerate(dequantize.inputs):
        if value is not None:
            dequantize.replace_input_with(index, _transposed(value, permutation, graph))
            if not value.uses() and value.name in graph.initializers:  # else all weights would be there twice
                del graph.initializers[value.name]
    axis = dequantize.attributes["axis"].as_int() % len(permutation)
    dequantize.attributes["axis"] = ir.AttrInt64("axis", permutation.index(axis))
    dequantize.metadata_props[PERMUTATION] = json.dumps(permutation)
    for reader in readers:
        reader.outputs[0].replace_all_uses_with(dequantize.outputs[0])
        assert reader.graph is not None
        reader.graph.remove(reader, safe=True)
    shape = dequantize.outputs[0].shape
    dequantize.outputs[0].shape = None if shape is None else ir.Shape([shape[axis] for axis in permutation])


def _transposed(value: ir.Value, permutation: tuple[int, ...], graph: ir.Graph) -> ir.Value:
    """An initializer with the content of ``value`` transposed."""
    name = f"{value.name}/transposed"
    if name in graph.initializers:
        return graph.initializers[name]
    assert value.const_value is not None
    tensor = ir.tensor(np.ascontiguousarray(value.const_value.numpy().transpose(permutation)), name=name)
    transposed = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
    graph.register_initializer(transposed)
    return transposed


def _is_stored(dequantize: ir.Node) -> bool:
    codes = dequantize.inputs[0]
    return codes is not None and codes.is_initializer()


def _is_dynamic(dequantize: ir.Node) -> bool:
    scale = dequantize.inputs[1]
    return scale is not None and not scale.is_initializer()


def _number(node: ir.Node, name: str, default: float) -> float:
    attribute = node.attributes.get(name)
    return default if attribute is None else float(attribute.value)
