"""The float model as ONNX, every value that is quantized a tensor of the name that an encodings file gives it.

Converters of runtimes read both: they take the float graph, and find the encoding of a tensor by its name. A value that
has another name already (an edge that is rounded once more, an input that is quantized for one reader alone) is read
through Identity.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes.common import OutputFixPass, RemoveUnusedNodesPass
from torch import fx

from qtk.calls.calls import Call
from qtk.calls.inputs import ExampleInputs
from qtk.errors import ExportError
from qtk.export.onnx.file_states import write_states
from qtk.export.onnx.marked_graph import DOMAIN, trace
from qtk.export.onnx.names import (
    ValueNames,
    drop_inferred_types,
    fix_lengths,
    name_inputs_and_outputs,
    name_lengths,
)
from qtk.export.onnx.node_writer import value_of
from qtk.export.onnx.onnxruntime.other_floats import OTHER_FLOATS, compute_in_float32
from qtk.export.onnx.onnxruntime.passes import file_contents
from qtk.export.onnx.qdq import EMBEDDED_LIMIT_BYTES, IR_VERSIONS, write
from qtk.export.onnx.storage_types import BASE_OPSET
from qtk.export.simulated_sites import simulated_sites


def export(
    model: fx.GraphModule,
    example_inputs: ExampleInputs | Call,
    path: str | os.PathLike[str],
    names: Mapping[str, str],
    *,
    opset: int = BASE_OPSET,
    embedded_limit_bytes: int = EMBEDDED_LIMIT_BYTES,
) -> None:
    """Writes a simulated model in float as ONNX; its dynamic dimensions stay dynamic.

    Args:
        model: the prepared model with its quantizers. It is exported in eval mode and not changed.
        example_inputs: a tensor, tuple or dict the model runs on, or a call of it; the values do not matter.
        path: the file to write.
        names: name of a tensor → name of its site, see ``tensor_names``; names of other graphs do not matter.
        opset: ONNX operator set.
        embedded_limit_bytes: models with larger weights keep them in a second file, ``<path>.data``.

    Raises: ExportError if a quantizer has no encoding, the graph has a site without a name, cannot be expressed in
        ONNX or cannot be written; CaptureError if the inputs are not nested as in the call the model was prepared with.
    """
    sites = simulated_sites(model)
    marked = trace(model, sites, example_inputs, opset=opset)
    graph = marked.model.graph
    fix_lengths(graph)
    wanted = _identities(graph, names)
    marked.model.opset_imports.pop(DOMAIN, None)
    RemoveUnusedNodesPass()(marked.model)
    OutputFixPass()(marked.model)
    values = ValueNames(graph)
    name_inputs_and_outputs(graph, values, marked.input_names, marked.output_names)
    write_states(marked.model, model)
    name_lengths(graph, marked.equal_axes)
    named: set[ir.Value] = set()
    for identity, name in wanted.items():
        _name(identity, name, graph, values, named)
    marked.model.producer_name, marked.model.producer_version = "qtk", None
    marked.model.ir_version = IR_VERSIONS["ai.onnx", opset]
    if not OTHER_FLOATS.isdisjoint(file_contents(marked.model)):
        compute_in_float32(marked.model)
    drop_inferred_types(graph)
    write(marked.model, Path(path), embedded_limit_bytes)


def read_names(path: str | os.PathLike[str]) -> set[str]:
    """The names of all tensors in an ONNX file, tensors in the bodies of loops included.

    Raises: ExportError if the file is not ONNX.
    """
    try:
        graph = ir.load(path).graph
    except Exception as error:
        raise ExportError(f"cannot read {path} as ONNX: {error}") from error
    made = (value for node in graph.all_nodes() for value in node.outputs)
    return {value.name for value in (*graph.inputs, *graph.initializers.values(), *made) if value.name}


def _identities(graph: ir.Graph, names: Mapping[str, str]) -> dict[ir.Node, str]:
    """Identity, in place of the marker of a site, → the name of its value, in graph order. In place.

    Raises: ExportError if a site has no name, or several values.
    """
    name_of = {site: name for name, site in names.items()}
    wanted: dict[ir.Node, str] = {}
    for marker in [node for node in graph.all_nodes() if node.domain == DOMAIN]:
        site = marker.attributes["site"].as_string()
        if site not in name_of:
            raise ExportError(f"{site}: the exported graph holds a value of it that has no name, or several")
        identity = _identity(marker, marker.inputs[0])
        marker.outputs[0].replace_all_uses_with(identity.outputs[0], replace_graph_outputs=True)
        assert marker.graph is not None
        marker.graph.remove(marker, safe=True)
        wanted[identity] = name_of.pop(site)
    return wanted


def _identity(before: ir.Node, value: ir.Value | None) -> ir.Node:
    assert value is not None
    assert before.graph is not None
    node = ir.node("Identity", [value], outputs=[value_of(value.dtype, value.shape)])
    before.graph.insert_before(before, node)
    return node


def _name(identity: ir.Node, name: str, graph: ir.Graph, values: ValueNames, named: set[ir.Value]) -> None:
    """Names the value that an Identity stands for, and removes the Identity if nothing needs it.

    A value that something else reads too has no encoding there, so it gets no name; the shape of a value
    may be read.
    """
    source, result = identity.inputs[0], identity.outputs[0]
    assert source is not None
    is_input = source.is_graph_input()
    readers = [node for node, _ in source.uses() if node.op_type != "Shape"]
    is_free = source not in named and not source.is_graph_output() and (
        source.name == name if is_input else readers == [identity])
    is_output = result in graph.outputs
    if is_output and result.name != name:  # an output keeps its name
        if not is_free:
            identity.replace_input_with(0, _identity(identity, source).outputs[0])
        source = identity.inputs[0]
        assert source is not None
        result = source
    elif is_free and not (is_output and (is_input or source.is_initializer())):
        result.replace_all_uses_with(source, replace_graph_outputs=True)
        assert identity.graph is not None
        identity.graph.remove(identity, safe=True)
        result = source
    values.give(result, name)
    named.add(result)
