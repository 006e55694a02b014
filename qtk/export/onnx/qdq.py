"""The export format ONNX QDQ: a quantized model with QuantizeLinear and DequantizeLinear, for runtimes.

Weights are stored as integers, 4 and 2 bit ones packed; every other quantized value goes through
QuantizeLinear and DequantizeLinear with the simulation's encoding, so both give the same codes. Tensors are named after
their sites.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import onnx
import onnx_ir as ir
import torch
from torch import fx

from qtk.calls.calls import Call
from qtk.calls.inputs import ExampleInputs
from qtk.calls.signature import output_nodes
from qtk.core.encoding import Encoding
from qtk.core.needs import found_where
from qtk.errors import ExportError
from qtk.export.onnx.file_contents import TARGET
from qtk.export.onnx.file_states import write_states
from qtk.export.onnx.marked_graph import MarkedGraph, trace
from qtk.export.onnx.names import drop_inferred_types
from qtk.export.onnx.onnxruntime.other_floats import OTHER_FLOATS, compute_in_float32
from qtk.export.onnx.onnxruntime.passes import (
    AFTER_SITES_ARE_LISTED,
    BEFORE_SITES_ARE_LISTED,
    FilePurpose,
    file_contents,
    run_passes,
)
from qtk.export.onnx.qdq_nodes import list_sites, replace_markers
from qtk.export.onnx.state_codes import return_codes
from qtk.export.onnx.storage_types import BASE_OPSET, BLOCK_OPSET, needs_21, opset_for
from qtk.export.onnx.stored_sites import FileSite, stored_sites
from qtk.export.simulated_sites import SimulatedSite, compare_encoding, simulated_sites
from qtk.graph.graphs import STATES
from qtk.operators.contents import Trait, contents
from qtk.report.stages import Begin, unseen

_LOGGER = logging.getLogger(__name__)

OPSET_REASON = "qtk.opset"
"""Metadata key of a file: why its opset is above 19."""

IR_VERSIONS = onnx.helper.OP_SET_ID_VERSION_MAP
"""(domain, opset) → the lowest version of the file format that supports it."""

EMBEDDED_LIMIT_BYTES = 2**27
"""Larger weights stand in a second file, which is written and read tensor by tensor: protobuf holds all of a file in
memory three times over while it writes one, and cannot hold 2 GB."""


def export(
    model: fx.GraphModule,
    example_inputs: ExampleInputs | Call,
    path: str | os.PathLike[str],
    *,
    opset: int | None = None,
    target: str | None = None,
    embedded_limit_bytes: int = EMBEDDED_LIMIT_BYTES,
    output_names: Sequence[str] | None = None,
    int16_sums: bool = False,
    state_codes: bool = False,
    contrib_operators: bool = False,
    functions: bool = True,
    begin: Begin = unseen,
) -> tuple[str, ...]:
    """Writes a simulated model as ONNX; its dynamic dimensions stay dynamic.

    Args:
        model: the prepared model with its quantizers. It is exported in eval mode and not changed.
        example_inputs: a tensor, tuple or dict the model runs on, or a call of it; the values do not matter.
        path: the file to write.
        opset: ONNX operator set; by default 19, 21 if a site needs it (4 or 16 bits, blocks), and 25 if weights alone
            are quantized and some to 2 bits; below 25, 2 bit codes are stored as 4 bit ones. The reason for more than
            19 is logged, and in the metadata ``qtk.opset`` of the file.
        target: the target that the file is for, in its metadata ``qtk.target``.
        embedded_limit_bytes: models with larger weights keep them in a second file, ``<path>.data``.
        output_names: names of the outputs that the model returns, in order; ``None``: see ``output_nodes``.
        int16_sums: whether the file may run on x86 without VNNI, in ONNX Runtime's exact mode (``separate_weights``).
        state_codes: whether states are inputs and outputs as codes (``qtk.export.onnx.state_codes``).
        contrib_operators: whether the file may hold operators of ONNX Runtime's own (``dynamic_lstms``); it is
            for no other runtime then (``FilePurpose``).
        functions: whether the file may hold functions of its own (``folded_weights``).
        begin: is told each stage, capturing, translating and writing, when it begins.

    Returns: the operators that compute in float32 what the model computes in float64 (``other_floats``).

    Raises: ExportError if a quantizer has no encoding, the opset is not supported, the names are not one for each
        output or are taken, a state has no codes, an op, a number format or a granularity cannot be expressed in ONNX,
        the result is not valid ONNX or cannot be written; CaptureError if the inputs are not nested as in the call
        the model was prepared with.
    """
    path = Path(path)
    sites = simulated_sites(model)
    lowest = opset_for(
        (site.spec for site in sites if site.constant is not None),
        (site.spec for site in sites if site.constant is None),
    )
    reasons = ((site.name, needs_21(site.spec, stored=site.constant is not None)) for site in sites)
    reason = next((f"{site} has {why}" for site, why in reasons if why is not None), None)
    opset = _checked_opset(lowest if opset is None else opset, reason)
    marked = trace(model, sites, example_inputs, opset=opset, contrib_operators=contrib_operators, begin=begin)
    begin("writing")
    if output_names is not None:
        marked = replace(marked, output_names=_checked_names(output_names, marked, [*output_nodes(model)]))
    graph, names = marked.model, replace_markers(marked, sites, opset=opset)
    purpose = FilePurpose(opset, int16_sums=int16_sums, onnxruntime=contrib_operators, functions=functions)
    run_passes(BEFORE_SITES_ARE_LISTED, graph, names, purpose)
    list_sites(graph)
    run_passes(AFTER_SITES_ARE_LISTED, graph, names, purpose)
    held = contents(model.graph.nodes) | set(model.meta)
    found_where({Trait.WRITES, STATES}, held, lambda: write_states(graph, model), None)
    if state_codes:
        return_codes(graph)
    graph.producer_name, graph.producer_version = "qtk", None
    graph.ir_version = IR_VERSIONS["ai.onnx", opset]
    if reason is not None:
        graph.metadata_props[OPSET_REASON] = reason
        _LOGGER.info("%s: opset %d, because %s", path.name, opset, reason)
    if target is not None:
        graph.metadata_props[TARGET] = target
    rounded: tuple[str, ...] = found_where(OTHER_FLOATS, file_contents(graph), lambda: compute_in_float32(graph), ())
    drop_inferred_types(graph.graph)
    drop_default_attributes(graph.graph, opset=opset)
    write(graph, path, embedded_limit_bytes)
    for value in graph.graph.initializers.values():
        value.const_value = None  # nodes and values hold one another, so that codes would stay while the file is read
    return rounded


def read(path: str | os.PathLike[str]) -> dict[str, Encoding]:
    """The encodings in a file that ``export`` wrote, bit for bit, in graph order; dynamic quantization has none.

    Raises: ExportError if the file is not ONNX, or holds a DequantizeLinear that qtk did not write.
    """
    return {site.name: site.encoding for site in stored_sites(path) if site.encoding is not None}


def compare_with_simulation(path: Path, model: fx.GraphModule) -> None:
    """Reads a file back and compares encodings and stored integers with the simulation it was exported from.

    Raises: ExportError naming the site of the first difference.
    """
    missing = {site.name: site for site in simulated_sites(model)}
    simulated = dict(missing)
    compared: set[tuple[str | None, ...]] = set()
    for stored in stored_sites(path):
        if stored.name not in simulated:
            raise ExportError(f"{stored.name} is not quantized in the simulation")
        missing.pop(stored.name, None)
        inputs = (stored.name, *(value.name for value in stored.node.inputs if value is not None))
        if inputs not in compared:  # an unrolled loop reads the same initializers at every step
            compared.add(inputs)
            _compare_site(stored, simulated[stored.name])
    if missing:
        raise ExportError(f"{next(iter(missing))} is missing in the file")


def _checked_names(names: Sequence[str], marked: MarkedGraph, returned: Sequence[str]) -> tuple[str, ...]:
    """The names of all outputs, buffers last.

    Args:
        names: of the outputs that the model returns.
        marked: the graph.
        returned: their own names.

    Raises: ExportError if they are not one for each output, each of another value.
    """
    if len(names) != len(returned):
        raise ExportError(f"output_names has {len(names)} names, and the model has {len(returned)} outputs: "
                          f"{', '.join(returned)}; give one for each, in this order")
    buffers = marked.output_names[len(returned):]
    seen = [*marked.input_names, *buffers]
    for name in names:
        if not name or name in seen:
            raise ExportError(f"output_names has {name!r}, which is empty or the name of another output or of an "
                              "input; give each output a name of its own")
        seen.append(name)
    return *names, *buffers


def _checked_opset(opset: int, reason: str | None) -> int:
    """Raises: ExportError if the installed onnx, QuantizeLinear of this opset or a site does not allow it."""
    lowest = BASE_OPSET if reason is None else BLOCK_OPSET
    if ("ai.onnx", opset) in IR_VERSIONS and opset >= lowest:
        return opset
    needs = f"QDQ needs {BASE_OPSET} or later" if reason is None else f"{reason}, which needs {BLOCK_OPSET} or later"
    raise ExportError(f"opset {opset}: {needs}, and the installed onnx knows up to {onnx.defs.onnx_opset_version()}; "
                      "leave opset out to get the lowest one that fits")


def write(graph: ir.Model, path: Path, embedded_limit_bytes: int) -> None:
    """Writes a graph, with weights above the limit in ``<path>.data``, and checks it.

    Raises: ExportError if it cannot be written or is not valid ONNX; the file is removed then.
    """
    size_bytes = sum(value.const_value.nbytes for value in graph.graph.initializers.values() if value.const_value)
    data = path.with_name(f"{path.name}.data")
    external = size_bytes > embedded_limit_bytes
    try:
        ir.save(graph, path, external_data=data.name if external else None)
        onnx.checker.check_model(str(path), full_check=True)
    except Exception as error:
        path.unlink(missing_ok=True)
        if external:
            data.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise ExportError(f"cannot write {path}: {error.strerror or error}") from error
        raise ExportError(f"the exported graph is not valid ONNX: {error}") from error


def _compare_site(stored: FileSite, simulated: SimulatedSite) -> None:
    name = stored.name
    if stored.spec != simulated.spec:
        raise ExportError(f"{name}: {stored.spec} in the file and {simulated.spec} in the simulation")
    if stored.encoding is not None and simulated.encoding is not None:
        compare_encoding(name, stored.encoding, simulated.encoding)
    if simulated.constant is None:
        return
    with torch.no_grad():
        expected = simulated.quantizer(simulated.constant).cpu()
    try:
        value = stored.constant()
    except (RuntimeError, ValueError) as error:
        raise ExportError(f"{name}: the scales do not fit the stored integers: {error}") from error
    if value is not None and value.numel() == 1:
        value = value.reshape(expected.shape)  # a scalar has the rank of what it is added to (scalar_ranks)
    if value is None or not torch.equal(value.to(expected.dtype), expected):
        raise ExportError(f"{name}: the stored integers differ from the codes of the simulation")


REPEATED = {"dilations": 1, "strides": 1, "pads": 0}
"""Lists whose documented default is this number along every axis."""


def drop_default_attributes(graph: ir.Graph, *, opset: int) -> None:
    """Removes attributes that say what ``onnx.defs`` or the operator's documentation gives as their default. In place.

    Attributes of QuantizeLinear and DequantizeLinear stay, so that the axis of scales can be read in every file.

    Args:
        graph: with its subgraphs.
        opset: of the operators of ONNX itself; operators of other domains stay as they are.
    """
    for node in graph.all_nodes():
        if node.domain or node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            continue
        schema = onnx.defs.get_schema(node.op_type, opset)
        for name, attribute in list(node.attributes.items()):
            if attribute.is_ref() or name not in schema.attributes:
                continue
            default = schema.attributes[name].default_value
            is_default = bool(default.type) and ir.from_proto(default).value == attribute.value
            if is_default or (name in REPEATED and set(attribute.value) == {REPEATED[name]}):
                del node.attributes[name]
