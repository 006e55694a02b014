"""Leaves out attributes whose value is what a missing one means."""

from __future__ import annotations

import onnx
import onnx_ir as ir

REPEATED = {"dilations": 1, "strides": 1, "pads": 0}
"""Lists whose documented default is this number along every axis."""


def drop_default_attributes(graph: ir.Graph, *, opset: int) -> None:
    """Removes attributes that say what ``onnx.defs`` or the operator's documentation gives as their default. In place.

    Args:
        graph: with its subgraphs.
        opset: of the operators of ONNX itself; those of other domains stay as they are.
    """
    for node in graph.all_nodes():
        if node.domain:
            continue
        schema = onnx.defs.get_schema(node.op_type, opset)
        for name, attribute in list(node.attributes.items()):
            if attribute.is_ref() or name not in schema.attributes:
                continue
            default = schema.attributes[name].default_value
            is_default = bool(default.type) and ir.from_proto(default).value == attribute.value
            if is_default or (name in REPEATED and set(attribute.value) == {REPEATED[name]}):
                del node.attributes[name]
