"""What a simulation, or a folder or file that was written of one, holds: encodings, quantized constants, what runs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from qtk.core.encoding import Encoding
from qtk.errors import EncodingError
from qtk.export import encodings_json
from qtk.export.simulated_sites import simulated_sites
from qtk.graph.graphs import roots
from qtk.graph.insert import QUANTIZERS
from qtk.graph.simulation import HasSimulation
from qtk.quantizers.quantizer import Mode, Quantizer
from qtk.workflow import store


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedSource:
    """A quantized model as far as it can be read.

    Args:
        name: in messages.
        encodings: site → encoding.
        constants: site of a weight → its quantized value, float32.
        model: what runs; ``None`` of files.
        files: the ONNX files, by the name that their sites have in front.
    """

    name: str
    encodings: Mapping[str, Encoding]
    constants: Mapping[str, Tensor]
    model: nn.Module | None = None
    files: Mapping[str, Path] = field(default_factory=dict)


def quantized_source(given: HasSimulation | str | os.PathLike[str]) -> QuantizedSource:
    """Reads a simulation; a folder of ``sim.save``; or what ``sim.export`` or ``qtk quantize`` wrote, or a file of it.

    Of folders the ONNX files are read, else the encodings; sites have the path of their file in front where there are
    several.

    Raises: EncodingError if nothing there can be read.
    """
    if not isinstance(given, (str, os.PathLike)):
        return _of_simulation(given)
    path = Path(given)
    if (path / store.SIM_FILE).is_file():
        return _of_saved(path)
    if path.is_file():
        return _of_files(path, [path])
    for pattern in ("*.onnx", "encodings.json"):
        if files := sorted(path.rglob(pattern)):
            return _of_files(path, files)
    raise EncodingError(f"{path} holds nothing to compare: give what sim.save, sim.export or qtk quantize wrote, with "
                        "sim.json, .onnx files or encodings.json, or one of these files")


def _of_simulation(sim: HasSimulation) -> QuantizedSource:
    simulation = sim.simulation
    encodings = {site.name: each for site, quantizer in simulation.quantizers.items()
                 if (each := quantizer.encoding) is not None and quantizer.mode is Mode.SIMULATE}
    constants = {}
    for graph in roots(simulation.model).values():
        for site in simulated_sites(graph):
            if site.constant is not None:
                constants[site.name] = _quantized(site.quantizer, site.constant)
    return QuantizedSource("the simulation", encodings, constants, simulation.model)


def _of_saved(path: Path) -> QuantizedSource:
    stored = store.load(path)
    keys = {name.partition(f"{QUANTIZERS}.")[2]: name for name in stored.state if QUANTIZERS in name.split(".")}
    encodings, constants = {}, {}
    for site, decided in stored.plan.items():
        leader = (decided.leader or site).name
        scale = keys.get(f"{leader}.scale")
        if scale is None or decided.spec.dynamic or decided.factors is not None:
            continue
        zero_point = None if decided.spec.symmetric else stored.state[keys[f"{leader}.zero_point"]].round().int()
        encodings[site.name] = encoding = Encoding(decided.spec, stored.state[scale].float(), zero_point)
        if site.name in stored.state:
            quantizer = Quantizer(decided.spec, site=site.name)
            quantizer.load_encoding(encoding)
            quantizer.mode = Mode.SIMULATE
            constants[site.name] = _quantized(quantizer, stored.state[site.name])
    return QuantizedSource(str(path), encodings, constants)


def _of_files(path: Path, files: list[Path]) -> QuantizedSource:
    encodings, constants = {}, {}
    prefixes = {file: "" if len(files) == 1 else f"{file.relative_to(path).with_suffix('').as_posix()}/"
                for file in files}
    for file, prefix in prefixes.items():
        for name, encoding, constant in _sites_in(file):
            encodings[prefix + name] = encoding
            if constant is not None:
                constants[prefix + name] = constant
    onnx_files = {prefix: file for file, prefix in prefixes.items() if file.suffix == ".onnx"}
    return QuantizedSource(str(path), encodings, constants, files=onnx_files)


def _sites_in(file: Path) -> Iterator[tuple[str, Encoding, Tensor | None]]:
    if file.suffix == ".onnx":
        from qtk.export.onnx.stored_sites import stored_sites  # loaded here: slow to import

        for site in stored_sites(file):
            if site.encoding is not None:
                yield site.name, site.encoding, site.constant()
    else:
        yield from ((name, encoding, None) for name, encoding in encodings_json.read(file).items())


def _quantized(quantizer: Quantizer, value: Tensor) -> Tensor:
    with torch.no_grad():
        result: Tensor = quantizer(value.detach()).float().cpu()
    return result
