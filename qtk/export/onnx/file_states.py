"""The states of an exported file: inputs that are outputs of the call before, and the values that they begin with.

They stand in the metadata ``qtk.states`` of the file, JSON that a program which runs it can read without qtk, as
``session.get_modelmeta().custom_metadata_map["qtk.states"]`` gives it to one that uses ONNX Runtime:

    {"cache": {"output": "cache_out", "site": "cache:input", "value": 0.0},
     "h": {"output": "output_1", "site": "h:input"}}

Name of the input → name of the output that it is in the next call, its site (where it is quantized, its encoding is in
``<site>.scale`` and ``<site>.zero_point``), and, of a buffer of the model, its value in front of the first call: one
number for all elements, or ``data``, its elements in base64, in C order and little-endian. Where neither is given, the
model takes the state from its caller, who has the first one.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir
import torch
from onnx_ir import tensor_adapters
from torch import Tensor, fx

from qtk.errors import ExportError
from qtk.export.file_signature import file_signature
from qtk.graph.graphs import returned_states
from qtk.graph.sites import value_site
from qtk.graph.written_buffers import buffer_values

STATES = "qtk.states"
"""Metadata key of a file: its states, as JSON."""


@dataclass(frozen=True, slots=True, eq=False)
class FileState:
    """A state of a file.

    Args:
        output: the name of the output that it is in the next call.
        first: its value in front of the first call; ``None``: the caller has it.
    """

    output: str
    first: Tensor | None


def write_states(model: ir.Model, graph: fx.GraphModule) -> None:
    """Writes the states of ``graph`` into the metadata of its file, whose inputs and outputs have their names."""
    signature = file_signature(graph)
    names = [[value.name or "" for value in values] for values in (model.graph.inputs, model.graph.outputs)]
    inputs, outputs = (dict(zip(own, there, strict=True)) for own, there in
                       zip((signature.inputs, signature.outputs), names, strict=True))
    entries: dict[str, dict[str, object]] = {
        inputs[given]: {"output": names[1][index], "site": value_site(signature.inputs[given]).name}
        for given, index in returned_states(graph).items() if given in inputs
    }
    values = buffer_values(graph)
    for buffer, (given, returned) in signature.buffers.items():
        site = value_site(signature.inputs[given]).name
        entries[inputs[given]] = {"output": outputs[returned], "site": site, **_encoded(values[buffer])}
    if entries:
        model.metadata_props[STATES] = json.dumps(entries, separators=(",", ":"))


def file_states(path: str | os.PathLike[str]) -> dict[str, FileState]:
    """Name of an input → state, of every state of a file.

    Raises: ExportError if the file is not ONNX, or its metadata are broken.
    """
    try:
        model = ir.load(path)
    except Exception as error:
        raise ExportError(f"cannot read {path} as ONNX: {error}") from error
    kinds = {value.name: value for value in model.graph.inputs}
    outputs = {value.name for value in model.graph.outputs}
    try:
        entries: Mapping[str, Mapping[str, object]] = json.loads(model.metadata_props.get(STATES, "{}"))
        states = {name: FileState(str(entry["output"]), _decoded(kinds[name], entry))
                  for name, entry in entries.items()}
        missing = next((state.output for state in states.values() if state.output not in outputs), None)
        if missing is not None:
            raise ValueError(f"there is no output {missing!r}")
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ExportError(f"{path}: the metadata {STATES} is broken: {error!r}; export the file again") from error
    return states


def _encoded(value: Tensor) -> dict[str, object]:
    first = value.flatten()[0] if value.numel() else None
    if first is not None and bool(first.isfinite()) and bool((value == first).all()):
        return {"value": first.item()}
    data = value.detach().cpu().contiguous().flatten().view(torch.uint8)  # numpy has no bfloat16
    return {"data": base64.b64encode(data.numpy().tobytes()).decode()}


def _decoded(value: ir.Value, entry: Mapping[str, object]) -> Tensor | None:
    if "value" not in entry and "data" not in entry:
        return None
    if value.dtype is None or value.shape is None:
        raise ValueError(f"{value.name} has no type")
    shape = [int(length) for length in value.shape]
    dtype: torch.dtype = tensor_adapters.to_torch_dtype(value.dtype)
    if isinstance(entry.get("value"), int | float):  # true and false, too
        return torch.tensor(entry["value"], dtype=dtype).repeat(shape)
    data = bytearray(base64.b64decode(str(entry["data"]), validate=True))
    return torch.frombuffer(data, dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)
