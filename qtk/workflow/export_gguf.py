"""Writes the quantized weights of a simulation into a copy of the user's GGUF file, for llama.cpp and its kin."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
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
from qtk.graph.parameter_readers import memory_of
from qtk.graph.simulation import HasSimulation
from qtk.numerics.codes import codes_of, values_of
from qtk.operators.targets import attribute
from qtk.public import public
from qtk.quantizers.quantizer import Mode

LISTED = 10
COLUMNS = 256
"""Columns by which rows are told apart."""

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
    torch.float16)``. The file is read back by the package gguf and compared: equal, but Q4_1 has a float16 minimum in
    place of a zero point, and so is off by up to half a bit of that.

    Args:
        sim: a simulation of which weights alone are quantized.
        path: the new file.
        template: the GGUF file of the float model.
        names: parameter → tensor, where the package gguf does not know it.
        force: replace an existing file.

    Returns: tensor → type, of those that were replaced.

    Raises: ExportError if the package is missing, a site has no such type, a weight no tensor in the template, or the
        template is of another model; if a file cannot be read or written, or read back differs.
    """
    source, replaced, expected = Template(Path(template)), dict[str, tuple[GgufType, Tensor]](), dict[str, Tensor]()
    for parameter, (weight, encoding) in _weights(sim.simulation.model).items():
        name = names.get(parameter) or source.name_of(parameter)
        if name is None or name not in source.tensors:
            raise ExportError(f"{parameter} has no tensor in {source.path} ({source.architecture}); say which, "
                              f"names={{{parameter!r}: 'blk.0.…'}}, or leave it in float")
        order = _order(source.floats(name), weight, parameter, source.path)
        kind = gguf_type(encoding.spec)
        assert kind is not None
        replaced[name] = kind, blocks_of(weight, encoding)[order]
        expected[name] = values_of(codes_of(weight, encoding), encoding)[order]
    target = Path(path)
    if target.exists() and not force:
        raise ExportError(f"{target} exists; pass force=True to replace it, or choose another name")
    stage = target.with_name(f"{target.name}.unfinished")
    try:
        source.write(stage, replaced)
        _compare(read(stage), expected, replaced)
        os.replace(stage, target)
    except OSError as error:
        raise ExportError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        stage.unlink(missing_ok=True)
    return {name: kind for name, (kind, _) in replaced.items()}


def _weights(model: nn.Module) -> dict[str, tuple[Tensor, Encoding]]:
    """Name → weight and encoding, on the CPU, of every quantized parameter.

    Raises: ExportError naming the sites that GGUF cannot hold.
    """
    names = {memory_of(tensor): name for name, tensor in reversed(model.state_dict().items())
             if tensor.numel() and QUANTIZERS not in name.split(".")}
    found: dict[str, tuple[Tensor, Encoding]] = {}
    findings: list[str] = []
    for graph in graphs(model).values():
        for node, quantizer in quantizer_nodes(graph).items():
            if quantizer.mode is not Mode.SIMULATE or not node.users:
                continue
            source, encoding = node.all_input_nodes[0], quantizer.encoding
            weight = attribute(graph, str(source.target)) if source.op == "get_attr" else None
            if not isinstance(weight, Tensor) or encoding is None or memory_of(weight) not in names:
                findings.append(f"{quantizer.site} is no parameter")
            elif gguf_type(encoding.spec) is None:
                findings.append(f"{quantizer.site} is {encoding.spec}")
            else:
                cpu = torch.device("cpu")
                found[names[memory_of(weight)]] = weight.detach().to(cpu), encoding.to(cpu)
    if findings or not found:
        more = [f"and {len(findings) - LISTED} more"] if len(findings) > LISTED else []
        raise ExportError("\n  ".join([
            "GGUF files hold weights in blocks of 32 alone ("
            + ", ".join(f"{kind}: {setting}" for kind, setting in SETTINGS.items()) + "); leave these in float:",
            *(findings[:LISTED] or ["no weight is quantized"]), *more]))
    return found


def _order(rows: Tensor, weight: Tensor, parameter: str, path: Path) -> Tensor:
    """The rows of ``weight`` in the order of the template's. Shape: both [out, in]; result int64 [out].

    Raises: ExportError if they are not the same rows.
    """
    if rows.shape != weight.shape:
        raise ExportError(f"{path} is of another model: {parameter} has shape {tuple(weight.shape)}, its tensor "
                          f"{tuple(rows.shape)}")
    step = max(1, weight.shape[1] // COLUMNS)
    template, own = rows[:, ::step].float(), weight[:, ::step].float()
    identity = torch.arange(len(rows))
    if float((template - own).square().sum()) < 0.1 * float(template.square().sum()):
        return identity
    order = torch.cat([torch.cdist(part, own).argmin(1) for part in torch.split(template, 1024)])
    error = float((template - own[order]).square().sum())
    if not torch.equal(order.sort().values, identity) or error >= 0.5 * float(template.square().sum()):
        raise ExportError(f"{path} is of another model: the rows of {parameter} are not those of its tensor; make the "
                          "template of the float model that was simulated")
    return order


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
