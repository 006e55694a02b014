"""Repeats the gates of channels along a row of the image that they multiply; values do not change.

ONNX Runtime's integer kernels have channels innermost, and multiply an image by one gate for each channel in runs of
that many values: 14 ns a run, beside 0.2 ns a value (seen in 1.32, x86). Repeated along a row, the gates make runs of
width × channels. 64 images of 16 × 56 × 56: 2.8 → 0.8 ms, with 0.01 ms for the repetition.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from qtk.export.onnx.names import ValueNames
from qtk.export.onnx.node_writer import DequantizeNodes, NodeWriter, codes_of, dequantize_of
from qtk.export.onnx.onnxruntime.convolution_zeros import is_integer_convolution
from qtk.export.onnx.storage_types import EIGHT_BITS


def repeat_gates(graph: ir.Graph, names: ValueNames) -> None:
    """Repeats the gate of every product of codes that integer convolutions alone read. In place."""
    nodes = DequantizeNodes(names)
    for node in list(graph):
        if node.op_type != "Mul" or not _feeds_integer_convolutions(node):
            continue
        for index, (gate, image) in enumerate((node.inputs, tuple(reversed(node.inputs)))):
            width = _width(gate, image)
            dequantize = dequantize_of(gate)
            if width > 1 and dequantize is not None:
                node.replace_input_with(index, _repeated(graph, dequantize, width, node, nodes))


def _width(gate: ir.Value | None, image: ir.Value | None) -> int:
    """The length of a row of an image, if both are computed codes of 8 bits, and ``gate`` has one for each channel."""
    for value in (gate, image):
        dequantize = dequantize_of(value)
        if dequantize is None or codes_of(dequantize).is_initializer() or codes_of(dequantize).dtype not in EIGHT_BITS:
            return 0
    assert gate is not None
    assert image is not None
    if gate.shape is None or image.shape is None or len(gate.shape) != 4 or len(image.shape) != 4:
        return 0
    width = image.shape[3]
    fits = gate.shape[1] == image.shape[1] and tuple(gate.shape[2:]) == (1, 1)
    return width if fits and isinstance(width, int) else 0


def _feeds_integer_convolutions(product: ir.Node) -> bool:
    readers = [reader for reader, _ in product.outputs[0].uses()]
    if len(readers) != 1 or readers[0].op_type != "QuantizeLinear":
        return False
    behind = [reader for each, _ in readers[0].outputs[0].uses() for reader, _ in each.outputs[0].uses()]
    return bool(behind) and all(map(is_integer_convolution, behind))


def _repeated(graph: ir.Graph, gate: ir.Node, width: int, before: ir.Node, nodes: DequantizeNodes) -> ir.Value:
    codes, value = codes_of(gate), gate.outputs[0]
    assert value.shape is not None
    assert codes.dtype is not None
    shape = ir.Shape([*value.shape[:3], width])
    writer = NodeWriter(graph, before, f"{value.name}/repeated", shape)
    repeats = writer.initializer(f"qtk.repeats.{width}", np.array([1, 1, 1, width], np.int64))
    repeated = writer.node("Tile", [codes, repeats], codes.dtype)
    return nodes.longer(gate, repeated.outputs[0], shape, before, axis=3)
