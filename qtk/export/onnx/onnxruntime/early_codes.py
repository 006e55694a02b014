"""Quantizes the results of products before they are moved, where ONNX Runtime does not; codes do not change.

It computes a Conv or Gemm in integers if QuantizeLinear reads the result, or a Relu or Clip of it. Where a Slice is
between them, as in causal convolutions, or DepthToSpace, as where images are enlarged, it computes in float, and mostly
behind Transpose too (seen in 1.32). An activation function and a rounding of each element are the same in front of what
moves the elements, which then moves codes.
"""

from __future__ import annotations

import onnx_ir as ir

from qtk.export.onnx.names import ValueNames
from qtk.export.onnx.onnxruntime.moved_codes import FOLLOWED
from qtk.export.onnx.onnxruntime.qdq_barrier import PRODUCTS
from qtk.export.onnx.storage_types import EIGHT_BITS

MOVERS = frozenset({*FOLLOWED, "DepthToSpace", "SpaceToDepth", "Gather"} - {"MaxPool"})
"""Operators whose results are elements of their first input."""

FUSED = ("Relu", "Clip")
"""Activation functions that become part of QuantizeLinear."""


def quantize_before_movement(graph: ir.Graph, names: ValueNames) -> None:
    """Moves activation functions and QuantizeLinear to the product, in front of movement. In place."""
    chains = {quantize: _chain(quantize) for quantize in graph if quantize.op_type == "QuantizeLinear"}
    moved = {quantize: chain for quantize, chain in chains.items() if any(node.op_type in MOVERS for node in chain)}
    for quantize, chain in moved.items():
        _reorder(chain, quantize)
    if moved:
        graph.sort()


def _chain(quantize: ir.Node) -> list[ir.Node]:
    """The operators between a product and the QuantizeLinear, in order; empty if there are others, or other readers."""
    scale, value = quantize.inputs[1], quantize.inputs[0]
    if quantize.outputs[0].dtype not in EIGHT_BITS or scale is None or scale.shape is None or len(scale.shape):
        return []
    chain: list[ir.Node] = []
    while value is not None and len(value.uses()) == 1 and not value.is_graph_output():
        node = value.producer()
        if node is not None and node.op_type in PRODUCTS:
            return chain[::-1]
        if node is None or node.op_type not in (*MOVERS, *FUSED):
            break
        chain.append(node)
        value = node.inputs[0]
    return []


def _reorder(chain: list[ir.Node], quantize: ir.Node) -> None:
    by_element = [*(node for node in chain if node.op_type in FUSED), quantize]
    movers = [node for node in chain if node.op_type in MOVERS]
    value, codes = chain[0].inputs[0], quantize.outputs[0]
    assert value is not None
    codes.replace_all_uses_with(movers[-1].outputs[0])
    whole = value.shape
    for node in (*by_element, *movers):
        node.replace_input_with(0, value)
        value = node.outputs[0]
        if node in by_element:
            value.shape = whole
        else:
            value.dtype = codes.dtype
