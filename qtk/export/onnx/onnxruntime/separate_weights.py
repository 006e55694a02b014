"""Gives each reader of a shared int8 weight its own DequantizeLinear, so that ONNX Runtime's exact mode opens the file.

``session.x64quantprecision=1`` stores int8 weights with a code outside of ±64 as uint8, under one new name for each
initializer, once for each operator that reads it: at the second one it refuses the file (seen in 1.32). It folds a
Transpose before that, so that two readers may share codes, not zero points, where one reads them transposed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from qtk.export.onnx.node_writer import insert_before, value_of
from qtk.export.onnx.qdq_nodes import SITES

EXACT_CODES = range(-64, 65)
"""Codes that ONNX Runtime's exact mode leaves in int8."""

MOST_READERS = 4
"""Weights of more readers, as in a loop that is unrolled, stay as they are: each may need a copy of the codes."""


@dataclass(frozen=True, slots=True, eq=False)
class _Reader:
    dequantize: ir.Node
    node: ir.Node
    place: int


def separate_weights(model: ir.Model) -> None:
    """Separates the readers of every weight that the exact mode would convert twice. In place."""
    record = json.loads(model.metadata_props[SITES])
    for codes in list(model.graph.initializers.values()):
        readers = _readers(codes, model.graph)
        if 1 < len(readers) <= MOST_READERS and _is_converted(codes):
            _separate(codes, readers, model.graph, record["nodes"])
    model.metadata_props[SITES] = json.dumps(record, separators=(",", ":"))


def _readers(codes: ir.Value, graph: ir.Graph) -> list[_Reader]:
    """Returns what reads the dequantized codes; none if something else reads the codes."""
    readers = []
    for dequantize, place in codes.uses():
        value = dequantize.outputs[0]
        plain = dequantize.op_type == "DequantizeLinear" and not dequantize.domain and place == 0
        plain = plain and dequantize.graph is graph  # others are read by float operators alone (folded_weights)
        if not plain or value.is_graph_output():
            return []
        readers += [_Reader(dequantize, node, index) for node, index in value.uses()]
    return readers


def _is_converted(codes: ir.Value) -> bool:
    if codes.const_value is None or codes.const_value.dtype != ir.DataType.INT8:
        return False
    array = codes.const_value.numpy()
    return bool(array.size and (array.min() < EXACT_CODES.start or array.max() >= EXACT_CODES.stop))


def _separate(
    codes: ir.Value, readers: list[_Reader], graph: ir.Graph, nodes: dict[str, list[object]]
) -> None:
    taken: set[ir.Node] = set()
    direct = 0
    for number, reader in enumerate(readers):
        dequantize = reader.dequantize
        is_direct = reader.node.op_type != "Transpose"
        direct += is_direct
        if number == 0:
            taken.add(dequantize)
            continue
        suffix = f"@reader{number}"
        _, scale, *zero_points = dequantize.inputs  # convolutions read none
        own = [_copy(codes, suffix, graph) if is_direct and direct > 1 else codes, scale,
               *(_copy(each, suffix, graph) for each in zero_points if each is not None)]
        if dequantize not in taken:  # the node of another call, which reads the same initializers
            taken.add(dequantize)
            for place, value in enumerate(own):
                dequantize.replace_input_with(place, value)
            continue
        result = value_of(dequantize.outputs[0].dtype, dequantize.outputs[0].shape)
        again = ir.node("DequantizeLinear", own, dict(dequantize.attributes), outputs=[result])
        result.name, again.name = f"{dequantize.outputs[0].name}{suffix}", f"{dequantize.name}{suffix}"
        insert_before(dequantize, again)
        reader.node.replace_input_with(reader.place, result)
        assert dequantize.name is not None
        site, *rest = nodes[dequantize.name]
        nodes[again.name] = [dequantize.name if site is None else site, *rest]


def _copy(value: ir.Value, suffix: str, graph: ir.Graph) -> ir.Value:
    assert value.const_value is not None
    name = f"{value.name}{suffix}"
    tensor = ir.tensor(np.array(value.const_value.numpy()), name=name)
    copied = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
    graph.register_initializer(copied)
    return copied
