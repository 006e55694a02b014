"""Carries quantized values across the boundary of a Scan as codes, so that a runtime finds Q/DQ around the cell's ops.

Each case moves a DequantizeLinear that its readers see through the boundary; values do not change.

1. A constant outside that the body reads is dequantized in the body, but for the weight of a product with a float:
   ONNX Runtime (seen in 1.32) would make that MatMulNBits, and fails for it finds no scale in the body.
2. A sequence of dequantized values is handed in as codes and dequantized in the body.
3. A dequantized result of the body is handed out as codes and dequantized outside.
4. A state that the body returns dequantized is carried as codes, if the first one is zero or has the same encoding:
   only then it is on the same grid. A Where that keeps the state of a sequence beyond its length picks codes then.
5. Dequantized values that the body splits are dequantized behind the split, one part for each gate.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from qtk.export.onnx.names import ValueNames
from qtk.export.onnx.node_writer import DequantizeNodes, codes_of, dequantize_of, insert_before
from qtk.export.onnx.onnxruntime.moved_codes import CHOSEN

MOVEMENT = ("Expand", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze")
"""Operators whose result holds nothing but values of their first input."""


def carry_codes(graph: ir.Graph, names: ValueNames) -> None:
    """Rewrites every Scan of ``graph``. In place."""
    for node in list(graph.all_nodes()):
        if node.op_type == "Scan":
            _Scan(node, names).rewrite()


class _Scan:
    """A Scan; the node and the body take the states, then the sequences, and return both in the same order."""

    def __init__(self, node: ir.Node, names: ValueNames) -> None:
        self.node, self.nodes = node, DequantizeNodes(names)
        self.body = node.attributes["body"].as_graph()
        self.num_states = len(node.inputs) - node.attributes["num_scan_inputs"].as_int()

    def rewrite(self) -> None:
        for node in list(self.body):
            if node.op_type == "Split":
                self._split_codes(node)
        for index in range(self.num_states, len(self.node.inputs)):
            dequantize = dequantize_of(self.node.inputs[index])
            if dequantize is not None:
                self._take_codes(index, codes_of(dequantize), dequantize)
        for index in range(self.num_states):
            self._carry_state(index)
        for index in range(self.num_states, len(self.node.outputs)):
            dequantize = dequantize_of(self.body.outputs[index])
            if dequantize is not None:
                self._return_codes(index, dequantize)
        self._dequantize_constants()

    def _dequantize_constants(self) -> None:
        """Case 1."""
        inside: dict[ir.Node, ir.Value] = {}
        for node in list(self.body.all_nodes()):
            if node.op_type in ("MatMul", "Gemm") and dequantize_of(node.inputs[0]) is None:
                continue
            for index, value in enumerate(node.inputs):
                outside = None if value is None else value.producer()
                if outside is None or outside.graph is self.body or outside.op_type != "DequantizeLinear":
                    continue
                if not codes_of(outside).is_initializer():
                    continue
                if outside not in inside:
                    copied = self.nodes.like(outside, codes_of(outside), outside.outputs[0].shape)
                    insert_before(self.body[0], copied)
                    inside[outside] = copied.outputs[0]
                node.replace_input_with(index, inside[outside])

    def _carry_state(self, index: int) -> None:
        """Case 4."""
        first, keeping = self.node.inputs[index], self._keeping(index)
        dequantize = dequantize_of(self.body.outputs[index] if keeping is None else keeping.inputs[1])
        if first is None or dequantize is None or (keeping is not None and codes_of(dequantize).dtype not in CHOSEN):
            return
        given = dequantize_of(first)
        if given is not None and given.inputs[1:] == dequantize.inputs[1:]:
            codes = codes_of(given)
        elif _is_zero(first):
            codes = self.nodes.quantized_like(dequantize, first, self.node)
        else:
            return
        self._take_codes(index, codes, dequantize)
        if keeping is None:
            self._return_codes(index, dequantize)
            return
        keeping.replace_input_with(1, codes_of(dequantize))
        keeping.replace_input_with(2, self.body.inputs[index])
        self.nodes.behind(keeping.outputs[0], dequantize)
        kept = dequantize_of(self.body.outputs[index])
        assert kept is not None
        self._return_codes(index, kept)

    def _keeping(self, index: int) -> ir.Node | None:
        """The Where that returns a state as it came, or a new one; ``None`` if the body has none."""
        producer = self.body.outputs[index].producer()
        is_keeping = producer is not None and producer.op_type == "Where"
        return producer if is_keeping and producer.inputs[2] is self.body.inputs[index] else None

    def _split_codes(self, node: ir.Node) -> None:
        """Case 5."""
        dequantize = dequantize_of(node.inputs[0])
        if dequantize is None:
            return
        node.replace_input_with(0, codes_of(dequantize))
        for part in node.outputs:
            self.nodes.behind(part, dequantize)

    def _take_codes(self, index: int, codes: ir.Value, dequantize: ir.Node) -> None:
        """Hands ``codes`` to the body, which dequantizes them like ``dequantize``."""
        self.node.replace_input_with(index, codes)
        value = self.body.inputs[index]
        inside = self.nodes.like(dequantize, value, value.shape)
        value.replace_all_uses_with(inside.outputs[0])
        inside.replace_input_with(0, value)
        value.dtype = codes.dtype
        insert_before(self.body[0], inside)

    def _return_codes(self, index: int, dequantize: ir.Node) -> None:
        """Returns the codes that ``dequantize`` reads in the body; outside they are dequantized like there."""
        self.body.outputs[index] = codes_of(dequantize)
        self.nodes.behind(self.node.outputs[index], dequantize)


def _is_zero(value: ir.Value) -> bool:
    """Says whether a value is made of constant zeros."""
    while (constant := ir.convenience.get_const_tensor(value)) is None:
        producer = value.producer()
        source = producer.inputs[0] if producer is not None and producer.op_type in MOVEMENT else None
        if source is None:
            return False
        value = source
    return not value.is_graph_input() and not np.any(constant.numpy())
