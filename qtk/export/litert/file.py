"""The export format LiteRT: a ``.tflite`` file that computes in integers between the sites of the simulation.

The converter litert-torch gets a program whose values and constants go through ``quantized_decomposed`` ops, and in its
strict mode makes an integer operator of each op that has codes on all sides; the rest stays in float. A file has one
row of the batch and the lengths of the example inputs. Its metadata ``qtk.sites`` say which tensor holds which site.
"""

from __future__ import annotations

import itertools
import json
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from qtk.calls.calls import Call
from qtk.core.dtypes import INT32
from qtk.core.encoding import Encoding
from qtk.core.spec import QuantSpec
from qtk.errors import ExportError
from qtk.export.file_signature import file_signature
from qtk.export.litert.flatbuffer import LiteRtModel, LiteRtTensor
from qtk.export.litert.library import MODULE_STACK, converted
from qtk.export.pt2e import exported_program
from qtk.export.pt2e_contents import TARGET
from qtk.export.simulated_sites import SimulatedSite, compare_encoding, simulated_sites
from qtk.export.site_ops import UnfoldedSite
from qtk.graph.sites import SITE, label
from qtk.graph.written_buffers import written_buffers
from qtk.numerics.codes import codes_of

SITES = "qtk.sites"
"""Name of the metadata: a list of site, index of its tensor, and spec."""

SHOWN = 5
"""How many sites a warning names."""


@dataclass(frozen=True, slots=True, eq=False)
class FileSite:
    """A site in a file.

    Args:
        name: name of the site.
        tensor: the first tensor that holds its codes.
        encoding: its encoding, as the file has it.
    """

    name: str
    tensor: LiteRtTensor
    encoding: Encoding


def export(
    model: fx.GraphModule, call: Call, path: str | os.PathLike[str], *, target: str | None = None, codes: bool = False
) -> None:
    """Writes a simulated model as ``.tflite``, for one row of the batch and the lengths of ``call``.

    Args:
        model: the prepared model with its quantizers; not changed.
        call: a call of the model; the values do not matter.
        path: the file to write.
        target: the target that the file is for, in its metadata ``qtk.target``.
        codes: take and return quantized inputs and outputs as their integer codes.

    Raises: ExportError if a quantizer has no encoding, the model writes into its buffers, the package litert-torch is
        missing, or its converter refuses the program.
    """
    if written_buffers(model.graph):
        raise ExportError("LiteRT files have no buffers that forward writes; make them inputs and outputs of the "
                          "model, QuantSim(…, states=…), or export formats=('onnx',)")
    program = exported_program(model, call, constants=UnfoldedSite, one_row=True)
    _name_values(program)
    signature = file_signature(model)
    file = LiteRtModel(converted(program, [*signature.inputs], [*signature.outputs]), Path(path).name)
    found = list(_found_sites(file, simulated_sites(model)))
    if codes:
        file.take_codes()
    sites = [[site.name, tensor.index, site.spec.to_json()] for site, tensor in found]
    file.set_metadata({SITES: json.dumps(sites).encode(), **({} if target is None else {TARGET: target.encode()})})
    Path(path).write_bytes(file.to_bytes())


def read(path: str | os.PathLike[str]) -> dict[str, Encoding]:
    """The encodings in a file that ``export`` wrote, bit for bit, in graph order; int32 biases are left out.

    Raises: ExportError if it is no such file, or was not written by qtk.
    """
    return {site.name: site.encoding for site in file_sites(LiteRtModel.load(Path(path)))}


def file_sites(file: LiteRtModel) -> list[FileSite]:
    """The sites that a file holds, in graph order. Raises: ExportError if it was not written by qtk."""
    if SITES not in file.metadata:
        raise ExportError(f"the .tflite file has no metadata {SITES}: qtk did not write it; export the simulation with "
                          "formats=('litert',)")
    tensors, sites = file.tensors, []
    for name, index, spec_json in json.loads(file.metadata[SITES]):
        spec, tensor = QuantSpec.from_json(spec_json), tensors[index]
        if tensor.scale is None or tensor.zero_point is None:
            raise ExportError(f"{name}: its tensor {tensor.name} has no scale; export the simulation again")
        if spec.symmetric and bool((tensor.zero_point != spec.middle_code).any()):
            raise ExportError(f"{name}: its tensor {tensor.name} has zero points other than {spec.middle_code}; export "
                              "the simulation again")
        zero_point = None if spec.symmetric else (tensor.zero_point - spec.middle_code).to(torch.int32)
        sites.append(FileSite(name, tensor, Encoding(spec, tensor.scale, zero_point)))
    return sites


def compare_with_simulation(path: Path, model: fx.GraphModule) -> None:
    """Reads a file back and compares encodings and stored integers with the simulation it was exported from.

    Warns of quantized values and weights that the file does not hold as integers.

    Raises: ExportError naming the site of the first difference.
    """
    file = LiteRtModel.load(path)
    stored = {site.name: site for site in file_sites(file)}
    simulated = {site.name: site for site in simulated_sites(model) if site.encoding is not None}
    for name, site in stored.items():
        encoding, constant = simulated[name].encoding, simulated[name].constant
        assert encoding is not None
        compare_encoding(name, site.encoding, Encoding(encoding.spec, encoding.scale.reshape(site.encoding.scale.shape),
                                                       _reshaped(encoding.zero_point, site.encoding.scale)))
        if constant is not None and not _holds(file.values(site.tensor), codes_of(constant.cpu(), encoding)):
            raise ExportError(f"{name}: the stored integers differ from the codes of the simulation")
    missing = [name for name, site in simulated.items() if name not in stored and site.spec.dtype != INT32]
    if missing:
        more = f" and {len(missing) - SHOWN} more" if missing[SHOWN:] else ""
        warnings.warn(f"{path.name} holds no codes of {', '.join(missing[:SHOWN])}{more}: LiteRT's converter computes "
                      "there in float, or has folded the value into another", stacklevel=2)


def _layouts(value: Tensor) -> Iterator[Tensor]:
    """A tensor with its channels where the simulation has them: as it is, or behind its first axis or first."""
    yield value
    if value.ndim > 2:
        yield value.movedim(-1, 1)
        yield value.movedim(-1, 0)


def _holds(stored: Tensor, codes: Tensor) -> bool:
    """Says whether a constant of a file is ``codes``, in the layout of its operator."""
    candidates = [each.reshape(codes.shape) for each in _layouts(stored) if each.numel() == codes.numel()]
    candidates += [stored.permute(order).reshape(codes.shape) for order in itertools.permutations(range(stored.ndim))
                   if stored.ndim <= 4 and stored.numel() == codes.numel()]
    return any(torch.equal(each.to(torch.int32), codes.to(torch.int32)) for each in candidates)


def _reshaped(zero_point: Tensor | None, scale: Tensor) -> Tensor | None:
    return None if zero_point is None else zero_point.reshape(scale.shape)


def _name_values(program: ExportedProgram) -> None:
    """Names each op by the site that quantizes its result, which the converter makes names of tensors from.

    Changes the metadata of the nodes.
    """
    names: dict[fx.Node, str] = {}
    for node in reversed(program.graph.nodes):
        if node.op == "call_function":
            read = [names[user] for user in node.users if user in names]
            names[node] = label(node, SITE) or (read[0] if read else node.name)
            node.meta[MODULE_STACK] = {"": ("", names[node])}


def _found_sites(file: LiteRtModel, sites: list[SimulatedSite]) -> Iterator[tuple[SimulatedSite, LiteRtTensor]]:
    """Each site with the tensor that holds it: of its scales and zero points, by its name if there are several."""
    quantized = [tensor for tensor in file.tensors if tensor.scale is not None]
    for site in sites:
        if site.encoding is None or site.spec.dtype == INT32:
            continue
        scale, zero_point = site.encoding.scale.cpu().flatten(), site.encoding.zero_point
        stored_zero = site.spec.middle_code + (0 if zero_point is None else zero_point.cpu().flatten().to(torch.int64))
        fitting = [
            tensor for tensor in quantized if tensor.is_constant == (site.constant is not None)
            and torch.equal(_filled(tensor.scale, scale), scale)
            and tensor.zero_point is not None and bool((tensor.zero_point == stored_zero).all())
        ]
        named = [tensor for tensor in fitting if site.name in tensor.name.replace(";;", ";").split(";")]
        if site.constant is not None:
            codes = codes_of(site.constant.cpu(), site.encoding)
            fitting = [tensor for tensor in fitting if _holds(file.values(tensor), codes)] or fitting[:1]
        if fitting:
            yield site, (named or fitting)[0] if site.constant is None else fitting[0]


def _filled(stored: Tensor | None, scale: Tensor) -> Tensor:
    """The scales of a tensor, for comparison with the scales of a site: none where their number is another."""
    return torch.empty(0) if stored is None or stored.shape != scale.shape else stored
