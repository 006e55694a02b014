"""The export format Core AI: an ``.aimodel`` directory whose program quantizes and dequantizes at the sites.

The converter coreai-torch gets the program of ``qtk.export.pt2e``, and writes its codes as constants and its ops as
Core AI's. Dynamic axes stay dynamic. The file's metadata ``qtk.sites`` say which operator holds which site.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from qtk.calls.calls import Call
from qtk.core.encoding import Encoding
from qtk.core.granularity import PerBlock
from qtk.core.spec import QuantSpec
from qtk.errors import ExportError
from qtk.export.coreai.library import converted, load, save
from qtk.export.coreai.stored_codes import DequantizedValue, StoredCodes
from qtk.export.file_signature import file_signature
from qtk.export.pt2e import exported_program
from qtk.export.pt2e_contents import TARGET
from qtk.export.simulated_sites import SimulatedSite, compare_stored_sites, simulated_sites
from qtk.export.site_ops import has_ops
from qtk.graph.written_buffers import written_buffers
from qtk.numerics.codes import codes_of, storage_dtype

SITES = "qtk.sites"
"""Name of the metadata: a list of site, number of its operator among all that dequantize, and spec."""

BYTES = (torch.int8, torch.uint8)
"""The codes that Core AI's operators take."""


def export(model: fx.GraphModule, call: Call, path: str | os.PathLike[str], *, target: str | None = None) -> None:
    """Writes a simulated model as ``.aimodel``, a directory; its dynamic dimensions stay dynamic.

    Args:
        model: the prepared model with its quantizers; not changed.
        call: a call of the model; the values do not matter.
        path: the directory to write.
        target: the target that the file is for, in its metadata ``qtk.target``.

    Raises: ExportError if a quantizer has no encoding, or codes that are not of 8 bits or fewer; the model writes into
        its buffers; the packages are missing; or the converter refuses the program.
    """
    if written_buffers(model.graph):
        raise ExportError("qtk writes no Core AI files with buffers that forward writes; make them inputs and outputs "
                          "of the model, QuantSim(…, states=…), or export formats=('onnx',)")
    sites = [site for site in simulated_sites(model) if _has_ops(site)]
    _check_codes(sites)
    signature = file_signature(model)
    program = converted(exported_program(model, call), [*signature.inputs], [*signature.outputs])
    found = [[site.name, index, site.spec.to_json()] for site, index in _found_sites(StoredCodes(program), sites)]
    save(program, Path(path), {SITES: json.dumps(found), **({} if target is None else {TARGET: target})})


def read(path: str | os.PathLike[str]) -> dict[str, Encoding]:
    """The encodings in a file that ``export`` wrote, bit for bit, in graph order; without encodings in plain ops.

    Raises: ExportError if it is no such file, or was not written by qtk.
    """
    return {name: encoding for name, encoding, _ in _stored_sites(Path(path))}


def compare_with_simulation(path: Path, model: fx.GraphModule) -> None:
    """Reads a file back and compares encodings and stored integers with the simulation it was exported from.

    Raises: ExportError naming the site of the first difference.
    """
    sites = {site.name: site for site in simulated_sites(model) if _has_ops(site)}
    compare_stored_sites({name: (encoding, codes) for name, encoding, codes in _stored_sites(path)}, sites)


def _has_ops(site: SimulatedSite) -> bool:
    return has_ops(site.spec, None if site.constant is None else site.constant.shape)


def _check_codes(sites: list[SimulatedSite]) -> None:
    """Raises: ExportError naming a site whose codes Core AI's operators do not take, or clamp otherwise."""
    for site in sites:
        dtype = storage_dtype(site.spec)
        if dtype not in BYTES or isinstance(site.spec.granularity, PerBlock):
            raise ExportError(f"{site.name} is {site.spec}: qtk writes codes of 8 bits at most for Core AI, per tensor "
                              "or per channel; use config='coreai', or a rule with 8 bits or float")
        limits = torch.iinfo(dtype)
        clamped = int(site.spec.qmin) + site.spec.middle_code, int(site.spec.qmax) + site.spec.middle_code
        if site.constant is None and clamped != (limits.min, limits.max):
            raise ExportError(f"{site.name} is clamped to codes from {clamped[0]} to {clamped[1]}, and Core AI clamps "
                              f"to all of {site.spec.dtype}; quantize it with 8 bits and narrow_range: false")


def _found_sites(stored: StoredCodes, sites: list[SimulatedSite]) -> Iterator[tuple[SimulatedSite, int]]:
    """Each site with the number of an operator that has its numbers, one after another if there are several.

    Raises: ExportError naming a site that the converter left out.
    """
    values = dict(enumerate(stored.values))
    for site in sites:
        assert site.encoding is not None
        expected = DequantizedValue(
            site.encoding.scale.cpu(), _stored_zero(site.encoding),
            None if site.constant is None else codes_of(site.constant.cpu(), site.encoding))
        found = next((index for index, value in values.items() if _same(value, expected)), None)
        if found is None:
            raise ExportError(f"{site.name} is not in the program that Core AI's converter wrote; leave it in float, "
                              "by a rule with output: float, or export formats=('onnx',)")
        yield site, found
        if sum(_same(value, expected) for value in values.values()) > 1:
            del values[found]


def _same(value: DequantizedValue, other: DequantizedValue) -> bool:
    if (value.codes is None) != (other.codes is None):
        return False
    pairs: list[tuple[Any, Any]] = [(value.scale, other.scale), (value.zero_point, other.zero_point)]
    if value.codes is not None:
        pairs.append((value.codes, other.codes))
    return all(one.numel() == two.numel() and torch.equal(one.flatten(), two.flatten()) for one, two in pairs)


def _stored_zero(encoding: Encoding) -> Tensor:
    """Zero points of the stored codes. Shape: as the scale."""
    given = encoding.zero_point
    return (torch.zeros_like(encoding.scale) if given is None else given).cpu().to(torch.int32) + (
        encoding.spec.middle_code if given is None else 0)


def _stored_sites(path: Path) -> Iterator[tuple[str, Encoding, Tensor | None]]:
    """Name, encoding and, of a constant, the stored codes of each site."""
    asset = load(path)
    listed = asset.metadata.creator_defined_metadata.get(SITES)
    if listed is None:
        raise ExportError(f"{path.name} has no metadata {SITES}: qtk did not write it; export the simulation with "
                          "formats=('coreai',)")
    values = StoredCodes(asset.program).values
    for name, index, spec_json in json.loads(listed):
        spec, value = QuantSpec.from_json(spec_json), values[index]
        yield name, Encoding(spec, value.scale, None if spec.symmetric else value.zero_point), value.codes
