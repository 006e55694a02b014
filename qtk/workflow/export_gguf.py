"""Writes the quantized weights of a simulation into a copy of the user's GGUF file, for llama.cpp and its kin."""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor, nn

from qtk.core.encoding import Encoding
from qtk.errors import ExportError
from qtk.export.gguf_blocks import SETTINGS, GgufType, blocks_of, gguf_type
from qtk.export.gguf_file import Template, read
from qtk.graph.graphs import graphs
from qtk.graph.insert import QUANTIZERS, quantizer_nodes
from qtk.graph.parameter_readers import memory_of, parameter_readers
from qtk.graph.simulation import HasSimulation
from qtk.numerics.codes import codes_of, values_of
from qtk.operators.targets import attribute
from qtk.public import public
from qtk.transforms.steps import op_changes
from qtk.workflow.check import check

LISTED = 10
COLUMNS = 256
"""Columns by which rows are told apart."""

ROUNDING = 1e-4
"""Of the sum of squares of a weight, more than what it loses when it is rounded to bfloat16."""

HALF = 2.0**-11
"""Half of the last bit of a float16, relatively."""


@public
def export_gguf(
    sim: HasSimulation, path: str | os.PathLike[str], *, template: str | os.PathLike[str],
    names: Mapping[str, str] = MappingProxyType({}), force: bool = False,
) -> dict[str, str]:
    """Writes a GGUF file: a copy of ``template`` with the weights that the simulation quantizes, as Q4_0, Q4_1 or Q8_0.

    The template is what llama.cpp's ``convert_hf_to_gguf.py --outtype f16`` makes of the float model: it has the
    tokenizer, the settings, the names, and the order of rows, which is kept (queries and keys of Llama are rearranged).
    int4 in blocks of 32 is Q4_0, asymmetric Q4_1, int8 Q8_0; scales are float16, ``qtk.round_scales(sim,
    torch.float16)``. Parameters in float stay as the template has them, and are compared with it. The file is read
    back by the package gguf and compared: equal, but Q4_1 has a float16 minimum in place of a zero point, and so is off
    by up to half a bit of that.

    Args:
        sim: a simulation of which weights alone are quantized.
        path: the new file.
        template: the GGUF file of the float model.
        names: parameter → tensor, where the package gguf does not know it.
        force: replace an existing file.

    Returns: tensor → type, of the tensors that were replaced.

    Warns: if a parameter in float has no tensor in the template, and so is not compared.

    Raises: CheckError if the simulation is not sound; ExportError if the package is missing, a site has no such type, a
        weight no tensor in the template, a weight is read in float or by another quantizer too, two parameters have one
        tensor, ``names`` has an unknown one, a transform has changed the ops, a parameter in float differs from the
        template, or the template is of another model; if a file cannot be read or written, or read back differs.
    """
    model = sim.simulation.model
    check(sim.simulation)
    changes = op_changes(model)
    if changes:
        raise ExportError(f"a transform has changed the ops of the model ({', '.join(changes)}), and llama.cpp runs "
                          "the original's; make the simulation without it")
    source, state = Template(Path(template)), _float_state(model)
    quantized, placed = _weights(model, state), _tensors(state, source, names)
    replaced, expected = dict[str, tuple[GgufType, Tensor]](), dict[str, Tensor]()
    for parameter, (weight, encoding) in quantized.items():
        if parameter not in placed:
            raise _no_tensor(parameter, source)
        kind = gguf_type(encoding.spec)
        assert kind is not None
        for name in placed[parameter]:
            order = _order(source.floats(name), weight, parameter, source.path)
            replaced[name] = kind, blocks_of(weight, encoding)[order]
            expected[name] = values_of(codes_of(weight, encoding), encoding)[order]
    _compare_floats({name: state[name][0] for name in state if name not in quantized}, placed, source,
                    dict(model.named_parameters()).keys())
    target = Path(path)
    if target.exists() and not force:
        raise ExportError(f"{target} exists; pass force=True to replace it, or choose another name")
    _write(source, target, replaced, expected)
    return {name: kind for name, (kind, _) in replaced.items()}


def _write(
    source: Template, target: Path, replaced: Mapping[str, tuple[GgufType, Tensor]], expected: Mapping[str, Tensor]
) -> None:
    """Writes the file, reads it back and compares it, whole or not at all. Raises: ExportError."""
    stage = target.with_name(f"{target.name}.unfinished")
    try:
        source.write(stage, replaced)
        _compare(read(stage), expected, replaced)
        os.replace(stage, target)
    except OSError as error:
        raise ExportError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        stage.unlink(missing_ok=True)


def _float_state(model: nn.Module) -> dict[str, tuple[Tensor, list[str]]]:
    """Name → value, and all of its names: of each parameter and buffer of floats, a tied one by its first name."""
    first: dict[object, str] = {}
    found: dict[str, tuple[Tensor, list[str]]] = {}
    for name, tensor in model.state_dict().items():
        if tensor.numel() and tensor.is_floating_point() and QUANTIZERS not in name.split("."):
            owner = first.setdefault(_view(tensor), name)
            found.setdefault(owner, (tensor, []))[1].append(name)
    return found


def _view(tensor: Tensor) -> tuple[object, ...]:
    """Returns what tied tensors have in common."""
    return *memory_of(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()


def _weights(
    model: nn.Module, state: Mapping[str, tuple[Tensor, list[str]]]
) -> dict[str, tuple[Tensor, Encoding]]:
    """Name → weight and encoding, on the CPU, of every quantized parameter.

    Raises: ExportError naming the sites that GGUF cannot hold.
    """
    names = {_view(tensor): name for name, (tensor, _) in state.items()}
    readers = parameter_readers(model)
    found: dict[str, tuple[Tensor, Encoding]] = {}
    findings: dict[str, None] = {}
    for graph in graphs(model).values():
        for node, quantizer in quantizer_nodes(graph).items():
            if not node.users:
                continue
            source, encoding = node.all_input_nodes[0], quantizer.encoding
            weight = attribute(graph, str(source.target)) if source.op == "get_attr" else None
            if not isinstance(weight, Tensor) or encoding is None or _view(weight) not in names:
                findings[f"{quantizer.site} is no parameter"] = None
            elif gguf_type(encoding.spec) is None:
                findings[f"{quantizer.site} is {encoding.spec}"] = None
            elif readers[memory_of(weight)] != {quantizer}:
                findings[f"{quantizer.site} is read in float, or by another quantizer, too, and the file has one "
                         "tensor of a tied weight; or give all layers that read it one rule"] = None
            else:
                cpu = torch.device("cpu")
                found[names[_view(weight)]] = weight.detach().to(cpu), encoding.to(cpu)
    if findings or not found:
        more = [f"and {len(findings) - LISTED} more"] if len(findings) > LISTED else []
        raise ExportError("\n  ".join([
            "GGUF files hold weights in blocks of 32 alone ("
            + ", ".join(f"{kind}: {setting}" for kind, setting in SETTINGS.items()) + "); leave these in float:",
            *(list(findings)[:LISTED] or ["no weight is quantized"]), *more]))
    return found


def _tensors(
    state: Mapping[str, tuple[Tensor, list[str]]], source: Template, names: Mapping[str, str]
) -> dict[str, list[str]]:
    """Name in ``state`` → its tensors in the template: several, if a tied parameter is stored more than once.

    Raises: ExportError if ``names`` has a parameter that is none, or a tensor that is none, or two parameters have one
        tensor.
    """
    owners = {alias: owner for owner, (_, aliases) in state.items() for alias in aliases}
    for parameter, name in names.items():
        if parameter not in owners:
            near = difflib.get_close_matches(parameter, owners, 1)
            raise ExportError(f"names={{{parameter!r}: …}}: the model has no such parameter"
                              f"{f'; did you mean {near[0]!r}?' if near else ''}; names go from parameters, as in "
                              "sim.model.state_dict(), to tensors of the template")
        if name not in source.tensors:
            raise _no_tensor(parameter, source)
    held: dict[str, str] = {}
    placed: dict[str, list[str]] = {}
    for alias, owner in owners.items():
        found = names.get(alias) or source.name_of(alias)
        if found is None:
            continue
        if held.setdefault(found, owner) != owner:
            raise ExportError(f"{held[found]} and {owner} are both {found} of {source.path}; say which tensor each is, "
                              f"names={{{owner!r}: 'blk.0.…'}}")
        if found not in placed.setdefault(owner, []):
            placed[owner].append(found)
    return placed


def _no_tensor(parameter: str, source: Template) -> ExportError:
    return ExportError(f"{parameter} has no tensor in {source.path} ({source.architecture}); say which, "
                       f"names={{{parameter!r}: 'blk.0.…'}}, or leave it in float")


def _compare_floats(
    values: Mapping[str, Tensor], placed: Mapping[str, list[str]], source: Template, parameters: Collection[str]
) -> None:
    """Compares what stays in float with the template, which keeps it.

    Raises: ExportError naming the parameters that differ from the template.
    """
    changed = [f"{parameter} ({name})" for parameter, value in values.items() for name in placed.get(parameter, ())
               if not _is_stored(source.floats(name), source.dtype(name), value.detach().cpu())]
    if changed:
        more = [f"and {len(changed) - LISTED} more"] if len(changed) > LISTED else []
        raise ExportError("\n  ".join([
            f"{source.path} keeps what is in float, and these are other numbers in the simulation (trained, scaled or "
            "corrected since, or in blocks in the template); load sim.model's parameters into the float model, and "
            "make the template of that with --outtype f16, or f32:", *changed[:LISTED], *more]))
    missing = [name for name in values if name in parameters and name not in placed]
    if missing:
        others = f" and {len(missing) - 1} other parameters" if missing[1:] else ""
        warnings.warn(f"{missing[0]}{others} in float: no tensor of {source.path} is known, so that these are not "
                      f"compared; say which, names={{{missing[0]!r}: 'blk.0.…'}}", stacklevel=3)


def _is_stored(stored: Tensor, dtype: torch.dtype | None, value: Tensor) -> bool:
    """Says whether ``stored`` is ``value`` but for the rounding of either's dtype, as llama.cpp's converter stores it.

    That rearranges rows, drops axes of length 1, and stores the norms of Gemma as 1 + w and A_log of Mamba as -exp(w).
    """
    if stored.numel() != value.numel():
        return False
    kinds = [value.dtype, *([] if dtype is None else [dtype])]
    eps, tiny = max(torch.finfo(kind).eps for kind in kinds), max(torch.finfo(kind).smallest_normal for kind in kinds)

    def near(one: Tensor, other: Tensor) -> bool:
        return bool(((one - other).abs() <= eps * other.abs() + eps * tiny).all())

    found, own = stored.flatten(), value.float().flatten()
    return any(near(found, form) or near(found.sort().values, form.sort().values)
               for form in (own, 1 + own, -own.exp()))


def _order(rows: Tensor, weight: Tensor, parameter: str, path: Path) -> Tensor:
    """The rows of ``weight`` in the order of the template's. Shape: both [out, in]; result int64 [out].

    What it proves of the template, by up to about ``COLUMNS`` columns: each of its rows is nearest to another row of
    the weight, all of these once, and they differ by less than half of the sum of squares; or, where rows are
    nearly equal, they differ in the order that they have by less than a tenth of it. It does not prove that the
    template is of the same numbers: a weight may have been rounded by a layer-wise method, or trained on, and it is the
    weight that is written.

    Raises: ExportError if they are not the same rows.
    """
    if rows.shape != weight.shape:
        raise ExportError(f"{path} is of another model: {parameter} has shape {tuple(weight.shape)}, its tensor "
                          f"{tuple(rows.shape)}")
    step = max(1, weight.shape[1] // COLUMNS)
    template, own = rows[:, ::step].float(), weight[:, ::step].float()
    identity, energy = torch.arange(len(rows)), float(template.square().sum())
    error_in_place = float((template - own).square().sum())
    if error_in_place <= ROUNDING * energy:
        return identity
    order = torch.cat([torch.cdist(part, own).argmin(1) for part in torch.split(template, 1024)])
    if torch.equal(order.sort().values, identity) and float((template - own[order]).square().sum()) < 0.5 * energy:
        return order
    if error_in_place < 0.1 * energy:
        return identity
    raise ExportError(f"{path} is of another model: the rows of {parameter} are not the rows of its tensor; make the "
                      "template of the float model that was simulated")


def _compare(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], replaced: Mapping[str, tuple[GgufType, Tensor]]
) -> None:
    """Raises: ExportError if what the package gguf reads is not what is simulated."""
    for name, value in expected.items():
        difference = (found[name] - value).abs()
        allowed = HALF * value.abs().amax() if replaced[name][0] == "Q4_1" else torch.tensor(0.0)
        if bool((difference > 2 * allowed).any()):
            raise ExportError(f"{name}: the file read back is off by {float(difference.max()):.3g}")
        if bool((difference > 0).any()):
            warnings.warn(f"{name}: the float16 minimum of Q4_1 is off by up to {float(difference.max()):.2g}; Q4_0, "
                          "symmetric, is the simulation exactly", stacklevel=3)
