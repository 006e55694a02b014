"""Writes a quantized hard sigmoid as a sum, for which ONNX Runtime has an integer kernel, unlike HardSigmoid.

clamp(x + 3, 0, 6) / 6 in scale s has the code of x + 3 in scale 6 · s: with codes that end at 0 and 1, rounding
clips. So QuantizeLinear of x + 3 in scale 6 · s, followed by the DequantizeLinear of the hard sigmoid itself, is one
QLinearAdd.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from qtk.export.onnx.names import ValueNames
from qtk.export.onnx.node_writer import NodeWriter, dequantize_of

CONSTANT = "qtk.constant"
"""Metadata key of a DequantizeLinear that is the constant of a formula and not a site, until the file is complete."""

ADDED, WIDTH = 3.0, 6.0


def add_hard_sigmoids(graph: ir.Graph, names: ValueNames) -> None:
    """Replaces each HardSigmoid of dequantized codes that is quantized to 0…1 and read by nothing else. In place."""
    for node in list(graph):
        if node.op_type == "HardSigmoid" and _is_torchs(node) and dequantize_of(node.inputs[0]) is not None:
            quantize = _quantized_by(node.outputs[0])
            if quantize is not None:
                _replace(graph, node, quantize, names)


def _is_torchs(node: ir.Node) -> bool:
    wanted = {"alpha": 1 / WIDTH, "beta": ADDED / WIDTH}
    return all(
        name in node.attributes and math.isclose(node.attributes[name].as_float(), number, rel_tol=1e-6)
        for name, number in wanted.items()
    )


def _quantized_by(value: ir.Value) -> ir.Node | None:
    """The QuantizeLinear that alone reads ``value``, if its codes of 8 bits end at 0 and 1; else ``None``."""
    readers = [reader for reader, _ in value.uses()]
    if len(readers) != 1 or readers[0].op_type != "QuantizeLinear" or value.is_graph_output():
        return None
    scale, zero_point = (_number(each) for each in readers[0].inputs[1:])
    codes = readers[0].inputs[2]
    unsigned = codes is not None and codes.dtype == ir.DataType.UINT8
    return readers[0] if unsigned and scale and zero_point == 0 and math.isclose(scale, 1 / 255, rel_tol=1e-6) else None


def _number(value: ir.Value | None) -> float | None:
    constant = None if value is None else value.const_value
    return float(constant.numpy().item()) if constant is not None and constant.size == 1 else None


def _replace(graph: ir.Graph, node: ir.Node, quantize: ir.Node, names: ValueNames) -> None:
    result, scale = node.outputs[0], _number(quantize.inputs[1])
    assert scale is not None
    name = result.name or node.name or "hard_sigmoid"
    writer = NodeWriter(graph, node, name, result.shape)
    code = [("code", np.uint8(1)), ("scale", np.float32(ADDED)), ("zero_point", np.uint8(0))]
    three = writer.node(
        "DequantizeLinear", [writer.initializer(f"qtk.three.{key}", np.array(number)) for key, number in code],
        ir.DataType.FLOAT, shape=ir.Shape([]),
    )
    three.metadata_props[CONSTANT] = ""
    total = writer.node("Add", [node.inputs[0], three.outputs[0]], ir.DataType.FLOAT)
    wide = writer.initializer(f"{name}/scale", np.array(np.float32(WIDTH) * np.float32(scale)))
    quantize.replace_input_with(0, total.outputs[0])
    quantize.replace_input_with(1, wide)
    graph.remove(node, safe=True)
    for made in (three, total):
        names.give(made.outputs[0], names.free(made.outputs[0].name or name))
    names.give(total.outputs[0], name)
