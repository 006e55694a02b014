"""States that a file takes and returns as integer codes: a loop keeps a quarter of the bytes, and moves no floats.

Both ends of a state have one encoding, so that a run returns the codes that the next one takes. The cases:

1. An input loses its QuantizeLinear: its DequantizeLinear reads the codes that are given. Other readers of the input
   get the dequantized value, but for Shape.
2. An output that a DequantizeLinear of this encoding makes, for others to read too, returns what that reads.
3. Any other output is quantized as the next run would quantize it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from qtk.errors import ExportError
from qtk.export.onnx.file_states import STATES
from qtk.export.onnx.names import ValueNames
from qtk.export.onnx.node_writer import have_equal_encodings, is_integer, value_of
from qtk.export.onnx.qdq_nodes import qparam_name


@dataclass(frozen=True, slots=True, eq=False)
class _Pair:
    """A state input, what quantizes it, and the place of the output that it is in the next run."""

    value: ir.Value
    quantize: ir.Node
    output: int


def return_codes(model: ir.Model) -> None:
    """Lets the states that callers pass on be codes. In place.

    Args:
        model: the file, with its sites and states in its metadata.

    Raises: ExportError for a state that has no integer codes of a calibrated range.
    """
    graph, names = model.graph, ValueNames(model.graph)
    states, outputs = json.loads(model.metadata_props.get(STATES, "{}")), [value.name for value in graph.outputs]
    pairs = [_pair(graph, state["site"], outputs.index(state["output"])) for state in states.values()
             if state.keys() == {"output", "site"}]  # others are buffers, which begin with floats
    for pair in pairs:
        _take_codes(graph, names, pair)
    for pair in pairs:
        _return_codes(graph, names, pair)
    RemoveUnusedNodesPass()(model)
    graph.sort()


def _pair(graph: ir.Graph, site: str, index: int) -> _Pair:
    scale = qparam_name(site, "scale")
    nodes = (node for node in graph if node.op_type == "QuantizeLinear")
    quantize = next((node for node in nodes if _name(node.inputs[1]) == scale), None)
    if quantize is None:
        raise ExportError(f"state_codes: the state {site} has no codes of a calibrated range in the file: it is left "
                          "in float or quantized dynamically; quantize it by a rule, or leave state_codes out")
    if not is_integer(quantize.outputs[0].dtype):
        raise ExportError(f"state_codes: the codes of {site} are no integers, and ONNX Runtime has no arrays of others "
                          "in Python; give it 8 or 16 bits, or leave state_codes out")
    return _Pair(_between(quantize)[-1], quantize, index)


def _name(value: ir.Value | None) -> str | None:
    return None if value is None else value.name


def _between(quantize: ir.Node) -> list[ir.Value]:
    """Returns what a QuantizeLinear reads, back to the input of the file that it quantizes."""
    values = [quantize.inputs[0]]
    while (value := values[-1]) is not None and (producer := value.producer()) is not None:
        values.append(producer.inputs[0])
    return [value for value in values if value is not None]


def _take_codes(graph: ir.Graph, names: ValueNames, pair: _Pair) -> None:
    """Case 1."""
    value, codes = pair.value, pair.quantize.outputs[0]
    made = {pair.quantize, *(between.producer() for between in _between(pair.quantize))}
    others = [(reader, index) for reader, index in value.uses() if reader not in made and reader.op_type != "Shape"]
    if others:
        dequantize = ir.node("DequantizeLinear", [codes, *pair.quantize.inputs[1:]], pair.quantize.attributes,
                             outputs=[value_of(ir.DataType.FLOAT, value.shape)])
        graph.append(dequantize)
        real = dequantize.outputs[0]
        if value.dtype != ir.DataType.FLOAT:
            real = _append(graph, "Cast", [real], value.dtype, value.shape, to=int(value.dtype or 0))
        for reader, index in others:
            reader.replace_input_with(index, real)
    for reader, index in list(value.uses()):
        if reader in made:
            reader.replace_input_with(index, None)
    codes.replace_all_uses_with(value)
    value.dtype = codes.dtype


def _return_codes(graph: ir.Graph, names: ValueNames, pair: _Pair) -> None:
    value = graph.outputs[pair.output]
    name, maker = value.name, value.producer()
    while maker is not None and maker.op_type in ("Identity", "Cast", "Max") and len(maker.inputs) == 1:
        source = maker.inputs[0]
        maker = None if source is None else source.producer()
    assert name is not None
    if maker is not None and _is_alike(maker, pair) and len(maker.outputs[0].uses()) > (maker.outputs[0] is not value):
        codes = maker.inputs[0]
        assert codes is not None
        if codes.is_graph_input() or codes.is_graph_output():
            codes = _append(graph, "Identity", [codes], codes.dtype, value.shape)
    else:
        kind = pair.value.dtype
        if value.dtype != ir.DataType.FLOAT:
            value = _append(graph, "Cast", [value], ir.DataType.FLOAT, value.shape, to=int(ir.DataType.FLOAT))
        axes = {key: each.as_int() for key, each in pair.quantize.attributes.items() if key == "axis"}
        codes = _append(graph, "QuantizeLinear", [value, *pair.quantize.inputs[1:]], kind, value.shape, **axes)
    codes.dtype, codes.shape = pair.value.dtype, graph.outputs[pair.output].shape
    graph.outputs[pair.output] = codes
    names.give(codes, name)


def _is_alike(dequantize: ir.Node, pair: _Pair) -> bool:
    """Says whether a node dequantizes computed codes as the input of the pair is dequantized."""
    codes = dequantize.inputs[0]
    if dequantize.op_type != "DequantizeLinear" or codes is None or codes.is_initializer():
        return False
    return have_equal_encodings(dequantize, pair.quantize)


def _append(
    graph: ir.Graph, op: str, inputs: list[ir.Value | None], dtype: ir.DataType | None, shape: ir.Shape | None,
    **attributes: int,
) -> ir.Value:
    node = ir.node(op, inputs, attributes, outputs=[value_of(dtype, shape)])
    graph.append(node)
    return node.outputs[0]
