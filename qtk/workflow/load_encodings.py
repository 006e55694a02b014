"""Loads encodings from a file into a simulation: all that is in it, or nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias

import torch
from torch import nn

from qtk.aimet import encodings_aimet, onnx_names
from qtk.aimet.encodings_aimet import StoredRecord
from qtk.aimet.named_encodings import site_shapes
from qtk.aimet.tensor_names import tensor_names
from qtk.core.encoding import Encoding
from qtk.core.granularity import PerTensor, Shape
from qtk.core.plan import QuantPlan, leaders
from qtk.core.site import Site
from qtk.core.spec import QuantSpec
from qtk.errors import EncodingError, QtkError
from qtk.export import encodings_json
from qtk.export.file_signature import file_signature
from qtk.graph.graphs import graphs, roots
from qtk.graph.insert import drop_sites
from qtk.graph.simulation import Simulation
from qtk.graph.sites import SITE, edge_site, label, ports
from qtk.nn.device import device_of
from qtk.public import public
from qtk.registry import did_you_mean

EncodingsSource: TypeAlias = str | os.PathLike[str] | Mapping[str, object]
"""A file, its content as JSON values, or site name → encoding."""

LISTED = 10
"""Findings that an error lists."""


@public
@dataclass(frozen=True, slots=True)
class LoadedEncodings:
    """What ``load_encodings`` took of a file; printable.

    Args:
        source: the file.
        loaded: names of the sites whose encodings were in it.
        ignored: names of entries that had no effect: of values that the model does not quantize.
        missing: names of the sites that have an encoding of their own, and no entry.
        frozen: whether the loaded ones were frozen.
    """

    source: str
    loaded: tuple[str, ...]
    ignored: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    frozen: bool = True

    def __str__(self) -> str:
        """One line for each kind of site.

        >>> print(LoadedEncodings("fc.json", ("fc.weight", "fc:out"), ignored=("fc.bias",)))
        fc.json: 2 encodings loaded and frozen
        ignored: fc.bias
        """
        lines = [f"{self.source}: {len(self.loaded)} encodings loaded{' and frozen' if self.frozen else ''}"]
        for word, names in (("ignored", self.ignored), ("missing", self.missing)):
            if names:
                lines.append(f"{word}: {', '.join(names)}")
        return "\n".join(lines)


class HoldsSimulation(Protocol):
    """What holds a simulation that may be replaced, as ``QuantSim``."""

    simulation: Simulation


def load_encodings(
    holder: HoldsSimulation, source: EncodingsSource, *, strict: bool, partial: bool, freeze: bool
) -> LoadedEncodings:
    """Loads encodings from a file of ``sim.export``, or from one of AIMET's; all of it, or nothing.

    >>> import pathlib, qtk, tempfile
    >>> model, x = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU()).eval(), torch.randn(16, 8)
    >>> sim = qtk.QuantSim(model, x)
    >>> sim.compute_encodings([x], progress=False)
    >>> folder = pathlib.Path(tempfile.mkdtemp()) / "exported"
    >>> sim.export(folder, formats="encodings")
    >>> again = qtk.QuantSim(model, x)
    >>> loaded = again.load_encodings(folder / "encodings_aimet_1.0.0.json")
    >>> len(loaded.loaded), loaded.frozen
    (3, True)
    >>> torch.equal(again.model(x), sim.model(x))
    True

    From another simulation, weights alone, free to be computed anew:

    >>> weights = {name: each for name, each in sim.encodings().items() if name.endswith("weight")}
    >>> print(again.load_encodings(weights, partial=True, freeze=False))
    the mapping: 1 encodings loaded
    missing: input:input, 1:out

    The format is found by itself: qtk's own, or AIMET's schema 0.6.1, 1.0.0, 2.0.0 or 2.1.0. Entries have the names
    that ``export`` gives tensors, names of torch's TorchScript exporter, or names of modules; beside an ONNX file of
    the same name also names of inputs and outputs of this file, and names of torch's other exporter.

    Args:
        holder: its simulation changes.
        source: a file, its content as JSON values, or site name → encoding. Frozen encodings are replaced too.
        strict: an entry of no site is an error; else it is ignored. Of AIMET's, entries of values that an operator only
            moved are always ignored: such a value has the encoding of what was moved.
        partial: a site without an entry keeps what it has; else that is an error.
        freeze: freeze what was loaded, so that ``compute_encodings`` keeps it.

    Raises: EncodingError listing what does not fit: names, widths, symmetry, shapes, numbers that are not finite;
        nothing has changed then.
    """
    simulation, where = holder.simulation, "the mapping" if isinstance(source, Mapping) else os.fspath(source)
    plan, content = simulation.plan, _content(source, where)
    by_name = {site.name: site for site in plan}
    site_names, moved = content.site_names(simulation, source)
    sites = {name: by_name[known] for name in content.entries if (known := site_names.get(name, "")) in by_name}
    ignored = [name for name in content.entries if name not in sites]
    masked = {by_name[name]: reason for name, reason in content.masked.items() if name in by_name}
    served = {plan[site].leader or site for site in sites.values()}
    missing = [site.name for site in leaders(plan)
               if site not in served and site not in masked and not plan[site].spec.dynamic]
    findings: list[str] = []
    loaded, biases = _encodings(content, sites, simulation, findings)
    if strict:
        findings += [_unknown(name, plan) for name in ignored if name not in moved]
        findings += [_unknown(name, plan) for name in content.dynamic if name not in by_name]
        findings += _unequal_products(biases, loaded, simulation)
    if not partial:
        findings += [f"{name} has no entry; partial=True leaves it as it is" for name in missing]
    findings += [f"{name} is {spec}, the site is planned as {plan[by_name[name]].spec}; plan the site like the file"
                 for name, spec in content.dynamic.items() if name in by_name and plan[by_name[name]].spec != spec]
    if content.entries and not sites and not findings:
        findings.append("no entry belongs to a site of the model; print(sim.plan) shows all")
    if findings:
        more = f"\n  and {len(findings) - LISTED} more" if len(findings) > LISTED else ""
        raise EncodingError(f"{where} does not fit the simulation, nothing was loaded:\n  "
                            + "\n  ".join(findings[:LISTED]) + more)
    _load(simulation, loaded, freeze=freeze)
    if masked:
        holder.simulation = drop_sites(simulation, masked)
    return LoadedEncodings(where, tuple(site.name for site in loaded), tuple(ignored), tuple(missing), freeze)


@dataclass(frozen=True, slots=True)
class _Content:
    """What a file holds: by name an encoding, or a record that becomes one for a spec and a shape."""

    entries: Mapping[str, Encoding | StoredRecord]
    dynamic: Mapping[str, QuantSpec] = field(default_factory=dict)
    masked: Mapping[str, str] = field(default_factory=dict)
    by_tensor: bool = False

    def site_names(self, simulation: Simulation, source: EncodingsSource) -> tuple[dict[str, str], set[str]]:
        """Name of an entry → name of its site, as far as it is known; and the names of values that were only moved."""
        if not self.by_tensor:
            return {name: name for name in self.entries}, set()
        beside = _OnnxCompanion.of(source)
        known = {site.name for site in simulation.plan}
        sites = {name: name for name in self.entries if name in known}
        sites |= onnx_names.sites_of(self.entries, known, beside.names)
        sites |= _sites_read(simulation.model) | _inputs_and_outputs(simulation.model, beside)
        moved = {name for name in self.entries if onnx_names.is_movement(name, beside.names)}
        return sites | tensor_names(simulation.model), moved


def _load(simulation: Simulation, encodings: Mapping[Site, Encoding], *, freeze: bool) -> None:
    """Loads encodings into the quantizers, frozen ones too. Changes ``simulation``."""
    device = device_of(simulation.model)
    for site, encoding in encodings.items():
        quantizer = simulation.quantizers[site]
        frozen, quantizer.frozen = quantizer.frozen, False
        quantizer.load_encoding(encoding.to(device))
        quantizer.frozen = freeze or frozen


def _content(source: EncodingsSource, where: str) -> _Content:
    """Raises: EncodingError if it cannot be read, or is of no known form."""
    if isinstance(source, Mapping) and all(isinstance(each, Encoding) for each in source.values()):
        return _Content({name: each for name, each in source.items() if isinstance(each, Encoding)})
    data = source if isinstance(source, Mapping) else encodings_json.load_object(source)
    if "format" in data:
        stored = encodings_json.parse(data, where)
        return _Content(stored.encodings, stored.dynamic, stored.masked)
    return _Content(encodings_aimet.records(data, where), by_tensor=True)


def _encodings(
    content: _Content, sites: Mapping[str, Site], simulation: Simulation, findings: list[str]
) -> tuple[dict[Site, Encoding], dict[Site, Encoding]]:
    """The encodings of leaders, and the encodings of int32 biases; adds what does not fit to ``findings``."""
    shapes, plan = site_shapes(simulation.model), simulation.plan
    loaded: dict[Site, Encoding] = {}
    biases: dict[Site, Encoding] = {}
    origins: dict[Site, str] = {}
    for name, site in sites.items():
        try:
            encoding = _encoding(content.entries[name], plan[site].spec, shapes.get(site.name))
        except QtkError as error:
            findings.append(f"{_called(name, site)}: {error}")
            continue
        owner = plan[site].leader or site
        into = loaded if plan[site].factors is None else biases
        if owner in into and not into[owner].equals(encoding):
            findings.append(f"{_called(name, site)} differs from {origins[owner]}, and both have one encoding here")
        into.setdefault(owner, encoding)
        origins.setdefault(owner, _called(name, site))
    order = [site for site in plan if site in loaded]
    return {site: loaded[site] for site in order}, biases


def _encoding(entry: Encoding | StoredRecord, spec: QuantSpec, shape: Shape | None) -> Encoding:
    """Raises: EncodingError, SpecError if the entry does not fit a site of this spec and shape."""
    if spec.dynamic:
        raise EncodingError(f"the site is planned as {spec}, each tensor in its own range; plan it without dynamic")
    encoding = entry if isinstance(entry, Encoding) else entry.encoding(spec, shape)
    if encoding.spec != spec:
        raise EncodingError(f"it is {encoding.spec}, the site is planned as {spec}; plan the site like the file: "
                            "weight_bits, activation_bits or a rule of the config")
    if shape is None and isinstance(spec.granularity, PerTensor):
        shape = ()  # one scale, whatever it is
    if shape is not None and tuple(encoding.scale.shape) != spec.granularity.qparam_shape(shape):
        raise EncodingError(f"its scale has shape {tuple(encoding.scale.shape)}, the site of shape {shape} needs "
                            f"{spec.granularity.qparam_shape(shape)}; the file is of another model")
    return encoding


def _called(name: str, site: Site) -> str:
    """The name of an entry, and of its site if that is another."""
    return name if name == site.name else f"{name} ({site})"


def _unknown(name: str, plan: QuantPlan) -> str:
    """Says why an entry has no site."""
    reason = next((why for site, why in plan.unquantized.items() if site.name == name), None)
    if reason is not None:
        return f"{name} is left in float here ({reason}); plan it, or pass strict=False to ignore it"
    hint = did_you_mean(name, [site.name for site in plan])
    return f"{name} is no site of the model; {f'{hint} ' if hint else ''}pass strict=False to ignore it"


def _unequal_products(
    biases: Mapping[Site, Encoding], loaded: Mapping[Site, Encoding], simulation: Simulation
) -> Iterable[str]:
    """A finding for each int32 bias whose scale would not be the scale of input times weight after loading."""
    for site, encoding in biases.items():
        factors = simulation.plan[site].factors
        assert factors is not None
        leaders = [simulation.plan[factor].leader or factor for factor in factors]
        scales = [loaded[each].scale if each in loaded else simulation.quantizers[each].scale for each in leaders]
        if None in scales:
            continue
        of_input, of_weight = (scale.cpu() for scale in scales if scale is not None)
        if not torch.equal(of_input * of_weight, encoding.scale):
            yield (f"{site}: an int32 bias needs the scale of {factors[0]} times the scale of {factors[1]}, and the "
                   "entry has another; pass strict=False to ignore it")


def _sites_read(model: nn.Module) -> dict[str, str]:
    """Input of an op (``conv:in[0]``) → the site of the quantized value that it reads."""
    read = {}
    for graph in graphs(model).values():
        for node in graph.graph.nodes:
            for port in ports(node) if node.op != "output" else ():
                site = label(port.value, SITE)
                if site is not None:
                    read[edge_site(port).name] = site
    return read


@dataclass(frozen=True, slots=True)
class _OnnxCompanion:
    """What the ONNX file beside encodings says: the names of its inputs and outputs, and what made its values."""

    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    names: Mapping[str, onnx_names.ExportedName] = field(default_factory=dict)

    @classmethod
    def of(cls, source: EncodingsSource) -> _OnnxCompanion:
        """Nothing if there is no file, or onnx is not installed. Raises: EncodingError if it is no ONNX file."""
        path = None if isinstance(source, Mapping) else Path(source).with_suffix(".onnx")
        if path is None or not path.is_file():
            return cls()
        try:
            import onnx_ir as ir  # an extra

            from qtk.aimet.onnx_scopes import exported_names
        except ImportError:
            return cls()
        try:
            graph = ir.load(path).graph
        except Exception as error:  # whatever protobuf finds in it
            raise EncodingError(f"{path}, whose inputs and outputs the encodings beside it are matched with, is no "
                                f"ONNX file ({error}); repair or remove it") from error
        inputs, outputs = (tuple(value.name or "" for value in values) for values in (graph.inputs, graph.outputs))
        return cls(inputs, outputs, exported_names(graph))


def _inputs_and_outputs(model: nn.Module, beside: _OnnxCompanion) -> dict[str, str]:
    """Name of an input or output in the ONNX file beside → its site; matched by order."""
    whole, sites = roots(model).get(""), tensor_names(model)
    if whole is None:
        return {}
    signature = file_signature(whole)
    pairs = (beside.inputs, [*signature.inputs]), (beside.outputs, [*signature.outputs])
    return {
        name: sites[own] for names, owns in pairs if len(names) == len(owns)
        for name, own in zip(names, owns, strict=True) if own in sites
    }
