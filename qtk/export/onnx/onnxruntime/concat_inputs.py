"""Lets Concat read dequantized values as they were produced, without a rounding to its grid in front of it.

The values that a quantized concatenation joins share its encoding; one that others read too is rounded once more, on
its edge. In a file the QuantizeLinear behind the Concat does the same, and ONNX Runtime's QLinearConcat maps the codes
of each input by a table of 256 entries, where the pair of QuantizeLinear and DequantizeLinear on the edge is two passes
over floats. A densely connected net has such a pair for almost every layer and every later one. Pairs that nothing else
reads leave the file; readers of the file get them back.
"""

from __future__ import annotations

import json

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from qtk.export.onnx.node_writer import codes_of, dequantize_of, value_of
from qtk.export.onnx.onnxruntime.moved_codes import carries_codes
from qtk.export.onnx.qdq_nodes import SITES

EDGES = "edges"
"""Key in the metadata ``qtk.sites``: name of a DequantizeLinear that left the file → names of the value that the
QuantizeLinear in front of it read, and of scale and zero point."""


def read_as_produced(model: ir.Model) -> None:
    """Removes the pairs in front of every Concat whose result is quantized with their encoding. In place."""
    record = json.loads(model.metadata_props[SITES])
    edges = {}
    for node in list(model.graph):
        quantize = _quantize(node.outputs[0]) if node.op_type == "Concat" else None
        for index, value in enumerate(node.inputs if quantize is not None else ()):
            pair = _rounded_again(value, quantize)
            if pair is None:
                continue
            source, again = pair
            node.replace_input_with(index, source)
            if not again.outputs[0].uses() and not again.outputs[0].is_graph_output():
                assert quantize is not None
                edges[again.name] = [each.name for each in (source, *quantize.inputs[1:]) if each is not None]
    if edges:
        model.metadata_props[SITES] = json.dumps({**record, EDGES: edges}, separators=(",", ":"))
        RemoveUnusedNodesPass()(model)


def restore_edges(model: ir.Model) -> None:
    """Adds the pairs that left the file with ``read_as_produced``; nothing reads them. In place."""
    edges = json.loads(model.metadata_props.get(SITES, "{}")).get(EDGES, {})
    values = {value.name: value for node in model.graph for value in node.outputs} if edges else {}
    for name, (source_name, *pair) in edges.items():
        source, scale, zero_point = values[source_name], *(model.graph.initializers[each] for each in pair)
        quantize = ir.node("QuantizeLinear", [source, scale, zero_point],
                           outputs=[value_of(zero_point.dtype, source.shape)])
        again = ir.node("DequantizeLinear", [quantize.outputs[0], scale, zero_point],
                        outputs=[value_of(source.dtype, source.shape)], name=name)
        quantize.name, quantize.outputs[0].name, again.outputs[0].name = (
            f"{name}/QuantizeLinear", f"{name}/codes", f"{name}/float"
        )
        producer = source.producer()
        assert producer is not None
        model.graph.insert_after(producer, [quantize, again])


def _quantize(value: ir.Value) -> ir.Node | None:
    """The QuantizeLinear with one scale that alone reads ``value``; else ``None``."""
    readers = [reader for reader, _ in value.uses()]
    if len(readers) != 1 or readers[0].op_type != "QuantizeLinear" or value.is_graph_output():
        return None
    return readers[0] if _scale_and_zero_point(readers[0]) is not None else None


def _rounded_again(value: ir.Value | None, quantize: ir.Node | None) -> tuple[ir.Value, ir.Node] | None:
    """A dequantized value, and the DequantizeLinear that makes ``value`` of it on the grid of ``quantize``."""
    again = dequantize_of(value)
    rounding = None if again is None else codes_of(again).producer()
    if again is None or rounding is None or rounding.op_type != "QuantizeLinear" or quantize is None:
        return None
    ours, theirs = _scale_and_zero_point(rounding), _scale_and_zero_point(quantize)
    source = rounding.inputs[0]
    if source is None or not carries_codes(source) or ours is None or theirs is None:
        return None
    pairs = zip(ours, theirs, strict=True)
    return (source, again) if all(np.array_equal(*pair) and pair[0].dtype == pair[1].dtype for pair in pairs) else None


def _scale_and_zero_point(quantize: ir.Node) -> tuple[np.ndarray, np.ndarray] | None:
    """Scale and zero point, if they are stored, for all of the tensor."""
    tensors = [None if value is None else value.const_value for value in quantize.inputs[1:]]
    if len(tensors) != 2 or tensors[0] is None or tensors[1] is None or tensors[0].size != 1:
        return None
    return tensors[0].numpy(), tensors[1].numpy()
