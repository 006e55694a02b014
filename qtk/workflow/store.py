"""A simulation on disk: every tensor in safetensors, everything else in JSON; nothing is ever unpickled.

``model.safetensors`` holds the state_dict (parameters, buffers, scales and zero points; tied tensors once),
buffers that are not persistent, and tensors that the model's code holds without registering them. Quantized weights are
float, or the codes of their quantizers.
``sim.json`` holds the arguments of ``QuantSim``, the plan, the steps of transforms (their tensors are in
``transforms.safetensors``), name, dtype and shape of every tensor, which quantizers are switched off, digests of the
files, a digest of the model's arithmetic, and the quantizers of weights that are stored as codes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from qtk.atomic import staged_directory
from qtk.calls.calls import leaves_text
from qtk.capture.free_shapes import shapes_from_json
from qtk.capture.prepared_model import PreparedModel
from qtk.core.encoding import Encoding
from qtk.core.plan import QuantPlan, SitePlan
from qtk.core.site import Site
from qtk.errors import EncodingError, ExportError
from qtk.export.encodings_json import load_object
from qtk.export.packed_weights import packed_weights, restored_weight
from qtk.export.plan_json import plan_from_json, plan_to_json
from qtk.graph.arithmetic import arithmetic_digest
from qtk.graph.insert import QUANTIZERS, drop_sites
from qtk.graph.simulation import Simulation
from qtk.nn.device import is_dry_run, without_values
from qtk.numerics.effective import effective_zero_point
from qtk.quantizers.quantizer import Mode, Quantizer
from qtk.registry import did_you_mean
from qtk.transforms.steps import Step, make, steps_of
from qtk.transforms.steps_json import steps_from_json, steps_to_json
from qtk.workflow.prepare import ExampleInputs, prepare_own

FORMAT, VERSION, READ_VERSIONS = "qtk.sim", 6, (4, 5, 6)
STATE_FILE, STEPS_FILE, SIM_FILE = "model.safetensors", "transforms.safetensors", "sim.json"
OLD_FLAGS = ("frozen", "rewrote_weight")
"""Flags of quantizers that version 4 stored beside the tensors; they are in the ``state_dict`` now."""

BYPASSED = "bypassed"
"""Key of the quantizers in BYPASS; all others come back in SIMULATE, for observers are not stored."""

LISTED = 10
"""Findings that an error lists."""

StoredWeights: TypeAlias = Literal["float", "integer"]
"""Whether quantized weights are stored as they are, or as the codes of their quantizers."""


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A simulation as read from disk.

    Args:
        arguments: keyword arguments of ``QuantSim``, as JSON holds them.
        plan: the plan it had.
        state: its tensors, on the CPU.
        steps: of the transforms made on its float model.
        arithmetic: digest of its model's ops; ``None`` if another version of torch captured them.
        flags: flag of a quantizer, or ``bypassed`` → the sites whose quantizers have it.
        variants: how many kinds of calls the model had graphs for, the example inputs not counted.
        calls: what the example inputs and the variants were, as text; empty: not stored.
    """

    arguments: Mapping[str, object]
    plan: QuantPlan
    state: Mapping[str, Tensor]
    steps: tuple[Step, ...] = ()
    arithmetic: str | None = None
    flags: Mapping[str, Collection[str]] = field(default_factory=dict)
    variants: object = 0
    calls: Sequence[str] = ()


def _full_state(model: nn.Module) -> dict[str, Tensor]:
    """The state_dict, and the buffers that are not in it."""
    state = model.state_dict()
    not_persistent = {name: buffer for name, buffer in model.named_buffers(remove_duplicate=False) if name not in state}
    return {**state, **not_persistent}


def save(
    directory: str | os.PathLike[str],
    simulation: Simulation,
    *,
    arguments: Mapping[str, object],
    weights: StoredWeights = "float",
    force: bool = False,
) -> None:
    """Writes a simulation into a new directory, completely or not at all, to be read by ``QuantSim.load``.

    >>> import qtk, tempfile
    >>> folder = Path(tempfile.mkdtemp()) / "saved"
    >>> qtk.QuantSim(nn.Linear(4, 2).eval(), torch.randn(8, 4)).save(folder)
    >>> sorted(path.name for path in folder.glob("[a-z]*"))
    ['model.safetensors', 'sim.json']

    Args:
        directory: the new directory.
        simulation: the simulation to save; its tensors may have any layout, and share memory.
        arguments: keyword arguments that ``QuantSim`` is to be called with again; JSON values.
        weights: ``"integer"`` stores quantized weights as codes, 4-bit ones in half a byte. What is loaded computes the
            same, bit for bit, but its weights are the dequantized ones: the float weights are lost for training.
        force: replace an existing directory.

    Raises: ExportError if the directory exists or cannot be written, the model is on the meta device, or its weights
        cannot be stored as codes.
    """
    if is_dry_run(simulation.model):
        raise ExportError(without_values(simulation.model))
    state = {name: _whole(name, tensor) for name, tensor in _full_state(simulation.model).items()}
    originals = _originals(state)
    packed = packed_weights(simulation, state) if weights == "integer" else {}
    kept = {name: packed[name].codes if name in packed else tensor.detach().contiguous()
            for name, tensor in state.items() if originals[name] == name}
    steps, step_tensors = steps_to_json(steps_of(simulation.model))
    record: dict[str, object] = {
        "format": FORMAT,
        "version": VERSION,
        "torch": torch.__version__,
        "arithmetic": arithmetic_digest(simulation.model),
        "arguments": dict(arguments),
        "variants": len(simulation.model.examples) - 1 if isinstance(simulation.model, PreparedModel) else 0,
        "calls": _calls(simulation.model),
        "plan": plan_to_json(simulation.plan),
        "steps": steps,
        "tensors": {name: _fingerprint(tensor) for name, tensor in state.items()},
        "tied": {name: original for name, original in originals.items() if original != name},
        "packed": {name: {"spec": weight.spec.to_json(), "quantizer": weight.quantizer}
                   for name, weight in packed.items()},
        "flags": {BYPASSED: [site.name for site, q in simulation.quantizers.items() if q.mode is Mode.BYPASS]},
    }
    with staged_directory(directory, force=force) as folder:
        try:
            save_file(_unshared(kept), folder / STATE_FILE)
            if step_tensors:
                save_file(_unshared(step_tensors), folder / STEPS_FILE)
        except SafetensorError as error:  # a full disk, among others
            raise ExportError(f"cannot write {directory}: {error}") from error
        record["digests"] = {path.name: _digest(path) for path in sorted(folder.glob("*.safetensors"))}
        record["digest"] = _record_digest(record)
        (folder / SIM_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def load(directory: str | os.PathLike[str]) -> Stored:
    """Reads what ``save`` wrote.

    Raises: EncodingError if a file is missing, malformed, of another version, or the two do not belong together.
    """
    record = load_object(Path(directory) / SIM_FILE)
    if record.get("format") != FORMAT:
        raise EncodingError(f"{Path(directory) / SIM_FILE} is not a saved simulation")
    if record.get("version") not in READ_VERSIONS:
        known = " and ".join(map(str, READ_VERSIONS))
        raise EncodingError(f"{directory}: version {record.get('version')} is not known; this qtk reads {known}")
    if record.get("digest") != _record_digest(record):
        raise EncodingError(f"{Path(directory) / SIM_FILE} is damaged or was edited; copy the directory again")
    match record:
        case {
            "arguments": dict(arguments), "plan": dict(plan), "steps": list(steps), "tensors": dict(tensors),
            "tied": dict(tied), "flags": dict(flags), "digests": dict(digests), "arithmetic": str(arithmetic), **rest,
        }:
            packed, calls = rest.get("packed", {}), rest.get("calls", [])
            is_known = all(isinstance(sites, list) for sites in flags.values()) and (
                all(isinstance(original, str) for original in tied.values())
                and isinstance(packed, dict) and packed.keys() <= tensors.keys()
                and isinstance(calls, list) and all(isinstance(call, str) for call in calls)
                and arguments.keys().isdisjoint(("model", "example_inputs", "in_place"))
            )
        case _:
            is_known, packed, calls = False, None, []
    if not is_known or not isinstance(packed, dict) or not isinstance(calls, list):
        raise EncodingError(f"{Path(directory) / SIM_FILE} is not a saved simulation")
    for name, digest in digests.items():
        if _digest(Path(directory) / name) != digest:
            raise EncodingError(f"{Path(directory) / name} is damaged, or the files are of two simulations; copy the "
                                "directory again")
    path = Path(directory) / STATE_FILE
    state = _tensors(path)
    step_tensors = _tensors(Path(directory) / STEPS_FILE) if (Path(directory) / STEPS_FILE).is_file() else {}
    state |= {name: restored_weight(name, how, state, tensors[name]) for name, how in packed.items()}
    state |= {name: state[original] for name, original in tied.items() if original in state}
    if {name: _fingerprint(tensor) for name, tensor in state.items()} != tensors:
        raise EncodingError(f"{path} does not hold the tensors that {SIM_FILE} lists; the files are of two simulations")
    state = {name: state[name] for name in tensors}
    return Stored(
        arguments, plan_from_json(plan), state, steps_from_json(steps, step_tensors),
        arithmetic if record.get("torch") == torch.__version__ else None, flags, record.get("variants", 0),
        calls,
    )


def prepare_stored(
    stored: Stored, model: nn.Module, example_inputs: ExampleInputs, *, in_place: bool,
    variants: Sequence[ExampleInputs],
) -> PreparedModel:
    """Prepares ``model`` and rewrites it as the stored simulation was; arguments as for ``QuantSim.load``.

    Raises: EncodingError if the stored model had a graph for more or fewer kinds of calls.
    """
    asked = "batch" if isinstance(model, PreparedModel) else stored.arguments.get("dynamic_shapes", "batch")
    shapes = shapes_from_json(asked)
    prepared = prepare_own(model, example_inputs, variants, in_place=in_place, dynamic_shapes=shapes)
    given = len(prepared.examples) - 1
    if stored.variants != given:
        raise EncodingError(f"the stored simulation has graphs for {stored.variants} variants, other kinds of "
                            f"calls, and {given} are given; give the variants that it was made with")
    make(prepared, stored.steps)
    return prepared


def _digest(path: Path) -> str:
    """Digest of a file. Raises: EncodingError if it cannot be read."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        with path.open("rb") as file:
            while chunk := file.read(2**24):
                digest.update(chunk)
    except OSError as error:
        raise EncodingError(f"cannot read {path}: {error}") from error
    return digest.hexdigest()


def _record_digest(record: Mapping[str, object]) -> str:
    """Digest of everything else in ``sim.json``."""
    rest = {name: value for name, value in record.items() if name != "digest"}
    return hashlib.blake2b(json.dumps(rest, sort_keys=True).encode(), digest_size=16).hexdigest()


def _tensors(path: Path) -> dict[str, Tensor]:
    """The tensors in a file. Raises: EncodingError if it cannot be read."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise EncodingError(f"cannot read {path}: {error}") from error


def restore(stored: Stored, simulation: Simulation) -> Simulation:
    """Loads a stored state into a simulation made anew with the stored arguments.

    Changes its model, only if all fits.

    Returns: the simulation without the sites that calibration had taken out of the stored one.

    Raises: EncodingError listing the sites and tensors that are missing, extra or different.
    """
    model, plan = simulation.model, simulation.plan
    masked = {site: why for site, why in stored.plan.unquantized.items() if site in plan and site not in stored.plan}
    expected = {site: decided for site, decided in plan.items() if site not in masked}
    findings = [
        *_site_findings(stored.plan, expected), *_tensor_findings(stored.state, _full_state(model)),
        *_encoding_findings(stored.state, model),
    ]
    if not findings and stored.arithmetic not in (None, arithmetic_digest(model)):
        findings = ["its ops, or their arguments, are not the same, though all names are"]
    if findings:
        more = f"\n  and {len(findings) - LISTED} more" if len(findings) > LISTED else ""
        raise EncodingError(_heading(stored.calls, _calls(model)) + "\n  ".join(["", *findings[:LISTED]]) + more)
    if masked:
        simulation = drop_sites(simulation, masked)
    device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    registered = model.state_dict().keys() | _quantizer_state(stored.state)
    model.load_state_dict({name: tensor.to(device) for name, tensor in stored.state.items() if name in registered})
    with torch.no_grad():
        for name, buffer in model.named_buffers(remove_duplicate=False):
            if name not in registered:
                buffer.copy_(stored.state[name])
    for site, quantizer in simulation.quantizers.items():
        for flag in OLD_FLAGS:
            if site.name in stored.flags.get(flag, ()):
                setattr(quantizer, flag, True)
        if site.name in stored.flags.get(BYPASSED, ()):
            quantizer.mode = Mode.BYPASS
    return simulation


def _calls(model: nn.Module) -> list[str]:
    """The example inputs and the variants of a model, as text."""
    return ["; ".join([leaves_text(call.args)] * bool(call.args) + [
        f"{name}: {leaves_text(value)}" for name, value in sorted(call.kwargs.items())
    ]) for call in (model.examples if isinstance(model, PreparedModel) else ())]


def _heading(stored: Sequence[str], given: Sequence[str]) -> str:
    """Says of which simulation what is stored is: of other calls, if there are several, or of another model."""
    if len(given) < 2 or not stored or list(stored) == list(given):
        return "the stored simulation is of another model:"
    names = ["example_inputs", *(f"variants[{index}]" for index in range(len(stored) - 1))]
    differ = [f"{name} {was}, given: {now}" for name, was, now in zip(names, stored, given, strict=False) if was != now]
    what = "has the graphs of these calls in another order; give them as they are stored" if (
        sorted(stored) == sorted(given)) else "is of another model, or of other calls"
    return "\n  ".join([f"the stored simulation {what}:", *differ, "the differences:"])


def _whole(name: str, tensor: Tensor) -> Tensor:
    """A quantizer's zero point as int32, unless averaging has left it between two codes; any other tensor as it is."""
    if name not in _quantizer_state((name,)) or not name.endswith(".zero_point"):
        return tensor
    codes = tensor.to(torch.int32)
    return codes if torch.equal(codes.to(tensor.dtype), tensor) else tensor


def _quantizer_state(state: Iterable[str]) -> set[str]:
    return {name for name in state if QUANTIZERS in name.split(".")}


def _originals(state: Mapping[str, Tensor]) -> dict[str, str]:
    """For each name the first name of the same tensor."""
    seen: dict[object, str] = {}
    names = {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        names[name] = seen.setdefault(key, name) if tensor.numel() else name
    return names


def _unshared(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, with a copy of each that shares memory with another; safetensors refuses shared memory."""
    owners: dict[object, str] = {}
    unshared = {}
    for name, tensor in state.items():
        key = (tensor.device, tensor.untyped_storage().data_ptr())
        shares = tensor.numel() > 0 and owners.setdefault(key, name) != name
        unshared[name] = tensor.clone() if shares else tensor
    return unshared


def _fingerprint(tensor: Tensor) -> list[object]:
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


def _site_findings(stored: QuantPlan, expected: Mapping[Site, SitePlan]) -> Iterator[str]:
    stored_names, names = {site.name for site in stored}, {site.name for site in expected}
    for name in sorted(stored_names - names):
        yield f"{name} is stored, the model has no such site{_hint(name, names)}"
    for name in sorted(names - stored_names):
        yield f"{name} is quantized in the model, but not stored{_hint(name, stored_names)}"
    for site, decided in expected.items():
        if site in stored and (stored[site].spec, stored[site].leader) != (decided.spec, decided.leader):
            yield f"{site} is stored as {_how(stored[site])}, planned here as {_how(decided)}"


def _how(decided: SitePlan) -> str:
    return f"{decided.spec}, encoded with {decided.leader}" if decided.leader else str(decided.spec)


def _tensor_findings(stored: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> Iterator[str]:
    """Differences of the float model's tensors; a quantizer has tensors only once it has an encoding."""
    stored_float = {name: tensor for name, tensor in stored.items() if name not in _quantizer_state(stored)}
    own_float = {name: tensor for name, tensor in own.items() if name not in _quantizer_state(own)}
    for name in sorted(stored_float.keys() - own_float.keys()):
        yield f"tensor {name} is stored, the model has none{_hint(name, own_float)}"
    for name in sorted(own_float.keys() - stored_float.keys()):
        yield f"tensor {name} of the model is not stored{_hint(name, stored_float)}"
    for name in sorted(stored_float.keys() & own_float.keys()):
        if _fingerprint(stored_float[name]) != _fingerprint(own_float[name]):
            yield f"tensor {name} is stored as {_text(stored_float[name])}, the model's is {_text(own_float[name])}"


def _encoding_findings(stored: Mapping[str, Tensor], model: nn.Module) -> Iterator[str]:
    """Scales and zero points that no encoding has."""
    for path, quantizer in model.named_modules():
        scale, zero_point = stored.get(f"{path}.scale"), stored.get(f"{path}.zero_point")
        if isinstance(quantizer, Quantizer) and scale is not None:
            try:
                if zero_point is not None:
                    zero_point = effective_zero_point(zero_point, quantizer.spec.qmin, quantizer.spec.qmax).int()
                Encoding(quantizer.spec, scale, zero_point)
            except EncodingError as error:
                yield f"{quantizer.site}: {error}"


def _text(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _hint(name: str, known: Iterable[str]) -> str:
    hint = did_you_mean(name, known)
    return f"; {hint}" if hint else ""
