"""States that a file takes and returns as integer codes: a loop keeps a quarter of the bytes, and moves no floats.

Both ends of a state have one encoding, so that a run returns the codes that the next one takes. The cases:

1. An input loses its QuantizeLinear: its DequantizeLinear reads the codes that are given. Other readers of the input
   get the dequantized value, but for Shape.
2. An output that a DequantizeLinear of this encoding makes, for others to read too, returns what that reads.
3. Any other output is quantized as the next run would quantize it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.passes.common import RemoveUnusedNodesPass
from torch import Tensor

from qtk.errors import ExportError
from qtk.export.onnx.node_writer import value_of
from qtk.export.onnx.site_outputs import SiteOutput
from qtk.export.onnx.stored_sites import stored_sites
from qtk.export.onnx.value_names import ValueNames

STATES = "qtk.states"
"""Metadata key of a file: JSON, name of an input that is a state → name of the output that it is in the next run."""


@dataclass(frozen=True, slots=True, eq=False)
class _Pair:
    """A state input, what quantizes and dequantizes it, and the place of the output that it is in the next run."""

    value: ir.Value
    quantize: ir.Node
    dequantize: ir.Node
    output: int


def return_codes(model: ir.Model, states: Mapping[str, int]) -> None:
    """Lets the states of a file be codes. In place.

    Args:
        model: the file, its sites listed.
        states: site of an input → index of the output that it is in the next run.

    Raises: ExportError for a state that has no integer codes of a calibrated range.
    """
    graph, names = model.graph, ValueNames(model.graph)
    made = {node.name: node for node in graph}
    pairs = [_pair(graph, made, site, index) for site, index in states.items()]
    for pair in pairs:
        _take_codes(pair)
    for pair in pairs:
        _return_codes(graph, names, pair)
    RemoveUnusedNodesPass()(model)
    graph.sort()


class StateCodes:
    """The states that a file has as codes, by the names of its inputs and outputs; none of most files.

    Args:
        file: an exported file.
    """

    def __init__(self, file: Path) -> None:
        model = ir.load(file)
        pairs = json.loads(model.metadata_props.get(STATES, "{}"))
        self._codes: dict[str, SiteOutput] = {}
        self._dtypes: dict[str, np.dtype[np.generic]] = {}
        kinds = {value.name: value.dtype for value in model.graph.inputs}
        for site in stored_sites(file) if any(_is_integer(kinds[name]) for name in pairs) else ():
            codes = site.node.inputs[0]
            if codes is not None and codes.name in pairs and codes.is_graph_input():
                kind = kinds[codes.name]
                assert kind is not None
                self._dtypes[codes.name] = np.dtype(kind.numpy())
                for name in (codes.name, pairs[codes.name]):
                    self._codes[name] = SiteOutput(site.name, 0, name, site.encoding)

    def stored(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Inputs by name, as the file takes them, of float ones."""
        return {
            name: torch.from_numpy(self._codes[name].stored(value.detach().cpu()).numpy().astype(self._dtypes[name]))
            if name in self._dtypes else value for name, value in inputs.items()
        }

    def reals(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the file returns, by name, in float."""
        codes = self._codes
        return {name: codes[name].reals(value) if name in codes else value for name, value in values.items()}


def _is_integer(kind: ir.DataType | None) -> bool:
    return kind is not None and kind.is_integer()


def _pair(graph: ir.Graph, made: Mapping[str | None, ir.Node], site: str, index: int) -> _Pair:
    dequantize = made.get(site)
    codes = None if dequantize is None else dequantize.inputs[0]
    quantize = None if codes is None else codes.producer()
    if dequantize is None or quantize is None or quantize.op_type != "QuantizeLinear" or not all(
        value is not None and value.is_initializer() for value in quantize.inputs[1:]
    ):
        raise ExportError(f"state_codes: the state {site} has no codes of a calibrated range in the file: it is left "
                          "in float or quantized dynamically; quantize it by a rule, or leave state_codes out")
    if not _is_integer(codes.dtype if codes is not None else None):
        raise ExportError(f"state_codes: the codes of {site} are no integers, and ONNX Runtime has no arrays of others "
                          "in Python; give it 8 or 16 bits, or leave state_codes out")
    value = quantize.inputs[0]
    while value is not None and not value.is_graph_input():
        producer = value.producer()
        value = None if producer is None else producer.inputs[0]
    assert value is not None
    return _Pair(value, quantize, dequantize, index)


def _take_codes(pair: _Pair) -> None:
    """Case 1."""
    value, codes = pair.value, pair.quantize.outputs[0]
    between, reader = [pair.quantize], pair.quantize
    while (made := reader.inputs[0]) is not None and made is not value and (producer := made.producer()) is not None:
        between.append(reader := producer)
    for reader, index in list(value.uses()):
        if reader not in between and reader.op_type != "Shape":
            reader.replace_input_with(index, pair.dequantize.outputs[0])
    between[-1].replace_input_with(0, None)
    codes.replace_all_uses_with(value)
    value.dtype = codes.dtype


def _return_codes(graph: ir.Graph, names: ValueNames, pair: _Pair) -> None:
    value = graph.outputs[pair.output]
    name, maker = value.name, value.producer()
    while maker is not None and maker.op_type in ("Identity", "Cast"):
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
    """Whether a node dequantizes computed codes as the input of the pair is dequantized."""
    codes = dequantize.inputs[0]
    if dequantize.op_type != "DequantizeLinear" or codes is None or codes.is_initializer():
        return False
    ours, theirs = pair.dequantize, dequantize
    tensors = [[None if value is None else value.const_value for value in node.inputs[1:]] for node in (ours, theirs)]
    return {**ours.attributes} == {**theirs.attributes} and len(tensors[0]) == len(tensors[1]) and all(
        a is not None and b is not None and a.dtype == b.dtype and np.array_equal(a.numpy(), b.numpy())
        for a, b in zip(*tensors, strict=True)
    )


def _append(
    graph: ir.Graph, op: str, inputs: list[ir.Value | None], dtype: ir.DataType | None, shape: ir.Shape | None,
    **attributes: int,
) -> ir.Value:
    node = ir.node(op, inputs, attributes, outputs=[value_of(dtype, shape)])
    graph.append(node)
    return node.outputs[0]
