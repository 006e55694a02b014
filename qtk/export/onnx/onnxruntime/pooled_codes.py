"""Writes the mean of an image as GlobalAveragePool, for which ONNX Runtime has an integer kernel, unlike ReduceMean."""

from __future__ import annotations

import onnx_ir as ir

from qtk.export.onnx.names import ValueNames
from qtk.export.onnx.node_writer import dequantize_of, insert_before, value_of


def pool_codes(graph: ir.Graph, names: ValueNames) -> None:
    """Replaces each ReduceMean over the last two of four axes that reads and makes quantized values. In place."""
    for node in list(graph):
        if node.op_type == "ReduceMean" and _is_of_images(node) and _quantizes(node.outputs[0]):
            _replace(graph, node, names)


def _is_of_images(node: ir.Node) -> bool:
    value, axes = node.inputs[0], node.inputs[1] if len(node.inputs) > 1 else None
    if value is None or value.shape is None or len(value.shape) != 4 or dequantize_of(value) is None or axes is None:
        return False
    constant = ir.convenience.get_const_tensor(axes)
    return constant is not None and sorted(int(axis) % 4 for axis in constant.numpy().reshape(-1)) == [2, 3]


def _quantizes(value: ir.Value) -> bool:
    """Says whether a value is quantized, and nothing else."""
    readers = [reader for reader, _ in value.uses()]
    return bool(readers) and not value.is_graph_output() and all(
        reader.op_type == "QuantizeLinear"
        or (reader.op_type in ("Reshape", "Squeeze", "Identity") and _quantizes(reader.outputs[0]))
        for reader in readers
    )


def _replace(graph: ir.Graph, node: ir.Node, names: ValueNames) -> None:
    value, mean = node.inputs[0], node.outputs[0]
    assert value is not None
    assert value.shape is not None
    shape = ir.Shape([*value.shape[:2], 1, 1])
    keepdims = node.attributes.get("keepdims")
    pooled = ir.node("GlobalAveragePool", [value], outputs=[value_of(value.dtype, shape)], name=node.name)
    insert_before(node, pooled)
    names.give(pooled.outputs[0], names.free(f"{mean.name}/GlobalAveragePool"))
    result, name = pooled.outputs[0], mean.name
    if keepdims is not None and keepdims.as_int() == 0:
        squeeze = ir.node("Squeeze", [result, node.inputs[1]], outputs=[value_of(mean.dtype, mean.shape)])
        insert_before(node, squeeze)
        result = squeeze.outputs[0]
    mean.replace_all_uses_with(result)
    graph.remove(node, safe=True)
    assert name is not None
    names.give(result, name)
    producer = result.producer()
    assert producer is not None
    producer.name = f"node_{name}"
