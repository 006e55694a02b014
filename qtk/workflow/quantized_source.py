"""What a simulation, or a folder or file that was written of one, holds: encodings, quantized constants, what runs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from qtk.core.encoding import Encoding
from qtk.core.site import Site
from qtk.core.spec import QuantSpec
from qtk.errors import EncodingError
from qtk.export import encodings_json
from qtk.export.simulated_sites import simulated_sites
from qtk.graph.graphs import roots
from qtk.graph.insert import QUANTIZERS
from qtk.graph.simulation import HasSimulation
from qtk.numerics.effective import effective_scale
from qtk.ops.simulate import simulate
from qtk.quantizers.quantizer import Mode, Quantizer
from qtk.workflow import store


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedSource:
    """A quantized model as far as it can be read.

    Args:
        name: in messages.
        encodings: site → encoding.
        constants: site of a weight → its quantized value, float32.
        parameters: name → float parameter or buffer without a site of its own, as a bias or the weight of a norm.
        dynamic: site of dynamic quantization → spec.
        model: what runs; ``None`` of files.
        files: the ONNX files, by the name that their sites have in front.
    """

    name: str
    encodings: Mapping[str, Encoding]
    constants: Mapping[str, Tensor]
    dynamic: Mapping[str, QuantSpec] = field(default_factory=dict)
    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    model: nn.Module | None = None
    files: Mapping[str, Path] = field(default_factory=dict)

    @property
    def specs(self) -> dict[str, QuantSpec]:
        """Site → spec, of all sites."""
        return {**{name: each.spec for name, each in self.encodings.items()}, **self.dynamic}


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
    active = {site.name: each for site, each in simulation.quantizers.items() if each.mode is Mode.SIMULATE}
    encodings = {name: each for name, quantizer in active.items() if (each := quantizer.encoding) is not None}
    dynamic = {name: quantizer.spec for name, quantizer in active.items() if quantizer.spec.dynamic}
    constants = {}
    for graph in roots(simulation.model).values():
        for site in simulated_sites(graph):
            if site.constant is not None:
                constants[site.name] = _quantized(site.quantizer, site.constant)
    parameters = _without_sites(simulation.model.state_dict(), constants)
    return QuantizedSource("the simulation", encodings, constants, dynamic, parameters, simulation.model)


def _of_saved(path: Path) -> QuantizedSource:
    stored = store.load(path)
    keys = {name.partition(f"{QUANTIZERS}.")[2]: name for name in stored.state if QUANTIZERS in name.split(".")}
    bypassed = stored.flags.get(store.BYPASSED, ())
    active = {site: decided for site, decided in stored.plan.items() if site.name not in bypassed}
    encodings: dict[str, Encoding] = {}

    def scale_of(site: Site) -> Tensor | None:
        decided = stored.plan[site]
        if decided.factors is not None:
            factors = [scale for scale in map(scale_of, decided.factors) if scale is not None]
            return factors[0] * factors[1] if len(factors) == 2 else None
        key = keys.get(f"{(decided.leader or site).name}.scale")
        return None if key is None else effective_scale(stored.state[key].float())

    for site, decided in active.items():
        scale = None if decided.spec.dynamic else scale_of(site)
        if scale is not None:
            zero_point = None if decided.spec.symmetric else stored.state[
                keys[f"{(decided.leader or site).name}.zero_point"]].round().int()
            encodings[site.name] = Encoding(decided.spec, scale, zero_point)
    constants = {name: simulate(stored.state[name], each.spec, each.scale, each.zero_point).float()
                 for name, each in encodings.items() if name in stored.state}
    dynamic = {site.name: decided.spec for site, decided in active.items() if decided.spec.dynamic}
    return QuantizedSource(str(path), encodings, constants, dynamic, _without_sites(stored.state, constants))


def _of_files(path: Path, files: list[Path]) -> QuantizedSource:
    encodings, constants, dynamic = dict[str, Encoding](), dict[str, Tensor](), dict[str, QuantSpec]()
    parameters = dict[str, Tensor]()
    prefixes = {file: "" if len(files) == 1 else f"{file.relative_to(path).with_suffix('').as_posix()}/"
                for file in files}
    for file, prefix in prefixes.items():
        for name, encoding, constant in _sites_in(file):
            if isinstance(encoding, QuantSpec):
                dynamic[prefix + name] = encoding
            else:
                encodings[prefix + name] = encoding
            if constant is not None:
                constants[prefix + name] = constant
    onnx_files = {prefix: file for file, prefix in prefixes.items() if file.suffix == ".onnx"}
    for prefix, file in onnx_files.items():
        parameters |= {prefix + name: value for name, value in _float_initializers(file)}
    return QuantizedSource(str(path), encodings, constants, dynamic, parameters, files=onnx_files)


def _sites_in(file: Path) -> Iterator[tuple[str, Encoding | QuantSpec, Tensor | None]]:
    """The name of each site, its encoding, or its spec if it has dynamic quantization, and its constant."""
    if file.suffix == ".onnx":
        from qtk.export.onnx.stored_sites import stored_sites  # loaded here: slow to import

        for site in stored_sites(file):
            yield site.name, site.encoding or site.spec, None if site.encoding is None else site.constant()
    else:
        content = encodings_json.parse(encodings_json.load_object(file), str(file))
        yield from ((name, encoding, None) for name, encoding in content.encodings.items())
        yield from ((name, spec, None) for name, spec in content.dynamic.items())


def _without_sites(state: Mapping[str, Tensor], constants: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The float parameters and buffers of a state that are neither quantized nor a quantizer's own."""
    return {name: value.detach().cpu() for name, value in state.items()
            if value.is_floating_point() and name not in constants and QUANTIZERS not in name.split(".")}


def _float_initializers(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Name and value of the floats that are stored in a file and read by more than conversions to and from codes."""
    import onnx_ir as ir  # an extra: loaded where it is needed

    conversions = ("QuantizeLinear", "DequantizeLinear")
    for name, value in ir.load(file).graph.initializers.items():
        if value.const_value is not None and value.dtype is not None and value.dtype.is_floating_point() and any(
            node.op_type not in conversions for node, _ in value.uses()
        ):
            yield name, torch.from_numpy(value.const_value.numpy().astype("float64"))


def _quantized(quantizer: Quantizer, value: Tensor) -> Tensor:
    with torch.no_grad():
        result: Tensor = quantizer(value.detach()).float().cpu()
    return result
