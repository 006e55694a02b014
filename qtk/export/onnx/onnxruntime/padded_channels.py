"""Gives convolutions of images with one to three channels four, the others zeros; values do not change.

ONNX Runtime's integer kernel of convolutions takes channels in fours (seen in 1.32, x86 with VNNI) and makes 16 at
least; other convolutions go through im2col. 64 images of 3 × 224 × 224, 3 × 3, 16 channels out: 18.9 ms, with a fourth
channel 10.7, and 0.9 to add it. Padded codes are the zero point, and their weights 0. With large kernels im2col is
about as fast (7 × 7, 64 out: 19.1 and 17.4 ms) or faster (16 × 16, 192 out: 2.5 and 3.1), so these stay. Weights of 4
bits stay as they are.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from qtk.export.onnx.names import ValueNames
from qtk.export.onnx.node_writer import DequantizeNodes, NodeWriter, codes_of, dequantize_of
from qtk.export.onnx.onnxruntime.convolution_zeros import is_integer_convolution

CHANNELS = 4
"""The channels that the kernel takes at a time."""

FEWEST_RESULTS = 16
"""The fewest channels that the kernel makes."""

LARGEST_KERNEL = 36
"""The most elements of a kernel's window for which padding is faster: 6 × 6."""

PADDED = "padded"


def pad_channels(graph: ir.Graph, names: ValueNames) -> None:
    """Pads the input and the weight of every integer convolution with fewer channels. In place."""
    inputs: dict[ir.Node, ir.Value] = {}
    weights: dict[ir.Node, ir.Value] = {}
    nodes = DequantizeNodes(names)
    for node in list(graph):
        weight = _weight(node)
        data = None if weight is None else dequantize_of(node.inputs[0])
        if weight is None or data is None or codes_of(data).is_initializer():
            continue
        if data not in inputs:
            inputs[data] = _padded_input(graph, data, node, nodes)
        if weight not in weights:
            weights[weight] = _padded_weight(graph, weight, node, nodes)
        node.replace_input_with(0, inputs[data])
        node.replace_input_with(1, weights[weight])


def _weight(node: ir.Node) -> ir.Node | None:
    """The node that dequantizes the stored weight of an integer convolution to be padded; else ``None``."""
    weight = None if node.op_type != "Conv" or node.inputs[1] is None else node.inputs[1].producer()
    if weight is None or weight.op_type != "DequantizeLinear" or not is_integer_convolution(node):
        return None
    codes, group = codes_of(weight), node.attributes.get("group")
    if not codes.is_initializer() or codes.dtype != ir.DataType.INT8 or codes.shape is None or len(codes.shape) != 4:
        return None
    results, channels, *window = codes.shape.numpy()
    gains = channels < CHANNELS and results >= FEWEST_RESULTS and np.prod(window) <= LARGEST_KERNEL
    return weight if gains and (group is None or group.as_int() == 1) else None


def _padded_input(graph: ir.Graph, data: ir.Node, before: ir.Node, nodes: DequantizeNodes) -> ir.Value:
    codes, value = codes_of(data), data.outputs[0]
    assert value.shape is not None
    channels = value.shape[1]
    assert isinstance(channels, int)
    shape = ir.Shape([value.shape[0], CHANNELS, *value.shape[2:]])
    writer = NodeWriter(graph, before, f"{value.name}/{PADDED}", shape)
    pads = np.array([0] * 5 + [CHANNELS - channels, 0, 0], np.int64)
    zero_point = data.inputs[2] if len(data.inputs) > 2 else None
    fill = () if zero_point is None else (zero_point,)
    assert codes.dtype is not None
    padded = writer.node("Pad", [codes, writer.initializer(f"qtk.pads.{channels}", pads), *fill], codes.dtype)
    return nodes.longer(data, padded.outputs[0], shape, before, axis=1)


def _padded_weight(graph: ir.Graph, weight: ir.Node, before: ir.Node, nodes: DequantizeNodes) -> ir.Value:
    codes = codes_of(weight)
    assert codes.const_value is not None
    array = codes.const_value.numpy()
    longer = np.pad(array, [(0, 0), (0, CHANNELS - array.shape[1]), (0, 0), (0, 0)])
    writer = NodeWriter(graph, before, str(codes.name), ir.Shape(longer.shape))
    return nodes.longer(
        weight, writer.initializer(f"{codes.name}/{PADDED}", longer), ir.Shape(longer.shape), before, axis=1)
