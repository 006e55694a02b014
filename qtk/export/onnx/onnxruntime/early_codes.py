"""Quantizes the results of products where they are computed, as ONNX Runtime asks for; codes do not change.

It computes a Conv, Gemm or Add in integers if QuantizeLinear reads the result, or a Relu or Clip of it whose bounds
are the bounds of the codes (seen in 1.32). The cases that it leaves in float:

1. A Slice is between, as in causal convolutions, DepthToSpace or Resize, as where images are enlarged, a MaxPool in
   front of a Relu, and mostly a Transpose too. QuantizeLinear goes in front of these; they move codes.
2. Codes reach beyond the bounds of the activation function, as for a Hardtanh, whose 0 is a code, or where there are
   fewer than 256. The function bounds the codes in place of the values: rounding keeps their order.

int8 codes stay where they are: ONNX Runtime makes them uint8 on x86, where DequantizeLinear reads them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from qtk.export.onnx.names import ValueNames
from qtk.export.onnx.node_writer import value_of
from qtk.export.onnx.onnxruntime.moved_codes import FOLLOWED, OF_ORDERED_CODES, takes_codes
from qtk.export.onnx.onnxruntime.qdq_barrier import PRODUCTS

MOVERS = frozenset({*FOLLOWED, *OF_ORDERED_CODES, "DepthToSpace", "SpaceToDepth", "Gather"})
"""Operators whose results are elements of their first input, which rounding and bounds leave the same elements."""

BOUNDING = ("Relu", "Clip")
COMPUTED = (*PRODUCTS, "Add")


def quantize_products(graph: ir.Graph, names: ValueNames) -> None:
    """Moves QuantizeLinear in front of movement, and of functions that bound its codes. In place."""
    is_reordered = False
    for quantize in [node for node in graph if node.op_type == "QuantizeLinear"]:
        chain = _chain(quantize)
        bounds = {node: _code_bounds(node, quantize) for node in chain if node.op_type in BOUNDING}
        if any(bounds.values()) or len(bounds) < len(chain):
            _reorder(graph, chain, quantize, bounds, names)
            is_reordered = True
    if is_reordered:
        graph.sort()


def _chain(quantize: ir.Node) -> list[ir.Node]:
    """The operators between the product and the QuantizeLinear; empty if there are others, or other readers."""
    scale, value = quantize.inputs[1], quantize.inputs[0]
    if quantize.outputs[0].dtype != ir.DataType.UINT8 or scale is None or scale.shape is None or len(scale.shape):
        return []
    chain: list[ir.Node] = []
    while value is not None and len(value.uses()) == 1 and not value.is_graph_output():
        node = value.producer()
        if node is not None and node.op_type in COMPUTED:
            return chain[::-1]
        if node is None or node.op_type not in (*MOVERS, *BOUNDING) or not takes_codes(node):
            break
        chain.append(node)
        value = node.inputs[0]
    return []


def _code_bounds(node: ir.Node, quantize: ir.Node) -> tuple[int, int] | None:
    """The codes of the bounds of a Relu or Clip; ``None`` if they are 0 and 255, or not known."""
    given, read = _numbers(quantize.inputs[1:]), _numbers(node.inputs[1:])
    if given is None or read is None:
        return None
    low, high = (0.0, None) if node.op_type == "Relu" else [*read, None, None][:2]
    scale, zero = [*given, 0.0][:2]
    ends = np.array([-np.inf if low is None else low, np.inf if high is None else high], np.float32)
    first, last = np.clip(np.rint(ends / np.float32(scale)) + zero, 0, 255).astype(int).tolist()
    return None if (first, last) == (0, 255) else (first, last)


def _numbers(values: Sequence[ir.Value | None]) -> list[float | None] | None:
    """The numbers of constants, ``None`` for one that is left out; ``None`` if one is computed."""
    tensors = [None if value is None else ir.convenience.get_const_tensor(value) for value in values]
    if any(value is not None and tensor is None for value, tensor in zip(values, tensors, strict=True)):
        return None
    return [None if tensor is None else float(tensor.numpy()) for tensor in tensors]


def _reorder(
    graph: ir.Graph, chain: list[ir.Node], quantize: ir.Node, bounds: dict[ir.Node, tuple[int, int] | None],
    names: ValueNames,
) -> None:
    """Writes the product's result quantized, then bounded, then moved."""
    value, codes = chain[0].inputs[0], quantize.outputs[0]
    assert value is not None
    shape = value.shape
    bounded = {node: _bounded(graph, node, found, codes, names) for node, found in bounds.items() if found is not None}
    movers = [node for node in chain if node not in bounds]
    of_elements = [*(node for node in bounds if node not in bounded), quantize, *bounded.values()]
    codes.replace_all_uses_with([*of_elements, *movers][-1].outputs[0])
    for node in (*of_elements, *movers):
        node.replace_input_with(0, value)
        value = node.outputs[0]
        if node in movers:
            value.dtype = codes.dtype
        else:
            value.shape = shape
    graph.remove(bounded, safe=True)


def _bounded(graph: ir.Graph, node: ir.Node, bounds: tuple[int, int], codes: ir.Value, names: ValueNames) -> ir.Node:
    """Clip of codes in place of a node, still without the codes that it reads."""
    ends: list[ir.Value | None] = []
    for bound, limit in zip(bounds, (0, 255), strict=True):
        if bound == limit:
            ends.append(None)
            continue
        name = names.free(f"{node.name}/bound")
        tensor = ir.tensor(np.array(bound, np.uint8), name=name)
        end = ir.Value(name=None, type=ir.TensorType(tensor.dtype), shape=ir.Shape([]), const_value=tensor)
        names.give(end, name)
        graph.register_initializer(end)
        ends.append(end)
    clip = ir.node("Clip", [codes, *ends], outputs=[value_of(codes.dtype, codes.shape)])
    names.give(clip.outputs[0], names.free(f"{codes.name}/Clip"))
    clip.name = node.name
    graph.insert_after(node, clip)
    return clip
