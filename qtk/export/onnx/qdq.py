"""ONNX with QuantizeLinear and DequantizeLinear (QDQ): the quantized model as runtimes read it.

Weights are stored as integers, 4 and 2 bit ones packed; every other quantized value passes QuantizeLinear and
DequantizeLinear with the scale of the simulation, so both round to the same codes. Tensors carry the names of sites.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import onnx
import onnx_ir as ir
import torch
from torch import fx

from qtk.capture.calls import Call
from qtk.capture.inputs import ExampleInputs
from qtk.core.encoding import Encoding
from qtk.core.granularity import PerTensor
from qtk.core.spec import QuantSpec
from qtk.errors import ExportError, QtkError
from qtk.export.onnx.container import BASE_OPSET, opset_for
from qtk.export.onnx.lower import SITE, SPEC, lower
from qtk.export.onnx.simulated_sites import simulated_sites
from qtk.export.onnx.trace import trace

IR_VERSIONS = onnx.helper.OP_SET_ID_VERSION_MAP
"""(domain, opset) → the lowest version of the file format that may hold it."""

PROTOBUF_LIMIT_BYTES = 2**31 - 2**20
"""What one protobuf file can hold, less a margin for the graph itself."""


def export(
    model: fx.GraphModule,
    example_inputs: ExampleInputs | Call,
    path: str | os.PathLike[str],
    *,
    opset: int | None = None,
    embedded_limit_bytes: int = PROTOBUF_LIMIT_BYTES,
) -> None:
    """Writes a simulating model as ONNX; dimensions that are dynamic in it stay so.

    Args:
        model: the prepared model with its quantizers. It is exported in eval mode and left as it is.
        example_inputs: a tensor, tuple or dict the model runs on, or a call of it; its numbers do not matter.
        path: the file to write.
        opset: ONNX operator set; by default 21, or 25 if weights alone are quantized and some to 2
            bits; below 25, 2 bit codes are stored as 4 bit ones.
        embedded_limit_bytes: models with larger weights keep them in a second file, ``<path>.data``.

    Raises: ExportError if a quantizer has no encoding, a part of the model or a granularity has no form in ONNX, or
        the result is not valid ONNX.
    """
    path = Path(path)
    sites = simulated_sites(model)
    if opset is None:
        opset = opset_for(
            (site.spec for site in sites if site.constant is not None),
            (site.spec for site in sites if site.constant is None),
        )
    if ("ai.onnx", opset) not in IR_VERSIONS or opset < BASE_OPSET:
        raise ExportError(f"opset {opset}: QDQ with 4 bits and blocks needs {BASE_OPSET} or later, and the installed "
                          f"onnx knows up to {onnx.defs.onnx_opset_version()}")
    traced = trace(model, sites, example_inputs, opset=opset)
    lower(traced, sites, opset=opset)
    graph = traced.model
    graph.producer_name, graph.producer_version = "qtk", None
    graph.ir_version = IR_VERSIONS["ai.onnx", opset]
    _write(graph, path, embedded_limit_bytes)


def read(path: str | os.PathLike[str]) -> dict[str, Encoding]:
    """The encodings in a file that ``export`` wrote, bit for bit, in graph order; those of run time are not in it.

    Raises: ExportError if the file is not ONNX, or holds a DequantizeLinear that qtk did not write.
    """
    try:
        graph = ir.load(path).graph
    except Exception as error:
        raise ExportError(f"cannot read {path} as ONNX: {error}") from error
    found = (_encoding(node, path) for node in graph if node.op_type == "DequantizeLinear")
    return dict(each for each in found if each is not None)


def _write(graph: ir.Model, path: Path, embedded_limit_bytes: int) -> None:
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


def _encoding(node: ir.Node, path: str | os.PathLike[str]) -> tuple[str, Encoding] | None:
    site, spec_text = node.metadata_props.get(SITE), node.metadata_props.get(SPEC)
    if site is None or spec_text is None:
        raise ExportError(f"{path}: {node.name} was not written by qtk, or its metadata is lost")
    try:
        spec = QuantSpec.from_json(json.loads(spec_text))
        if spec.dynamic:
            return None
        scale, zero_point = (_initializer(value) for value in node.inputs[1:])
        if isinstance(spec.granularity, PerTensor):
            scale, zero_point = scale.reshape(1), zero_point.reshape(1)
        return site, Encoding(spec, scale.float(), None if spec.symmetric else zero_point.int())
    except (QtkError, ValueError) as error:
        raise ExportError(f"{path}: {site}: {error}") from error


def _initializer(value: ir.Value | None) -> torch.Tensor:
    if value is None or value.const_value is None:
        raise ValueError("scale and zero point must be initializers")
    array = value.const_value.numpy()
    return torch.from_numpy(array.astype("float32" if array.dtype.kind == "f" else "int32"))
