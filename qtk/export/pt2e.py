"""The export format PT2E: an ExportedProgram with the quantize and dequantize ops that compilers lower.

Every quantized value goes through ``quantized_decomposed::quantize_*`` and ``dequantize_*`` with the simulation's
encoding; weights are integer constants and ``dequantize_*``. Buffers that forward writes stay buffers that the program
writes. What these ops cannot hold (dynamic ranges, activations in
small floats or blocks) is plain ATen. A process that loads the file needs torch alone, and the ops: ``import
torch.ao.quantization.fx._decomposed``, as torchao and ExecuTorch do.

The reference of ``quantize_*`` multiplies by the reciprocal of the scale where the simulation divides: the codes of a
value within a rounding error of the middle between two differ by one.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram

from qtk.calls.calls import Call
from qtk.calls.inputs import input_leaves
from qtk.calls.signature import output_nodes
from qtk.capture.composites import Composite, composite_called
from qtk.capture.recurrent_tracing import lengths_stay_free
from qtk.capture.torch_export import silent_torch
from qtk.config.load import runtime_of_target
from qtk.config.runtime import NeighbourRule
from qtk.core.encoding import Encoding
from qtk.core.spec import QuantSpec
from qtk.errors import ExportError, first_line
from qtk.export.float_products import copy_float_operands
from qtk.export.free_axes import doubled, file_axes, free_axes, warn_of_fixed_axes, warn_of_written_values
from qtk.export.pt2e_contents import TARGET
from qtk.export.repeated_ops import dequantize_for_each_reader, is_dequantize, repeat_behind_movement
from qtk.export.simulated_sites import SimulatedSite, compare_stored_sites, simulated_sites
from qtk.export.site_ops import SPEC, ComputedSite, StoredSite, UnfoldedSite, has_ops
from qtk.graph.graphs import graphs
from qtk.graph.insert import quantizer_nodes
from qtk.graph.sites import SITE, label
from qtk.graph.written_buffers import is_written, written_buffers
from qtk.nn.eval_mode import evaluating
from qtk.operators.targets import attribute, packed_call
from qtk.ops import fake_quantize_float, onnx_form
from qtk.ops.pack_padded import pack_padded
from qtk.torch_private import CallStructure, branches, call_structure, load_decomposed_ops, pytree, return_dict

_OPS = "qtk_sites"
"""The submodule of an exported graph that holds the numbers of its sites, each under the site's name."""

_LOCAL = ("stack_trace", "from_node", "torch_fn", "source_fn_stack")
"""Metadata of nodes that is left out: paths of source files of this machine, and half of the bytes of a small file."""

_PLAIN = {
    torch.ops.qtk.fake_quantize.default: onnx_form.fake_quantize,
    torch.ops.qtk.fake_quantize_dynamic.default: onnx_form.fake_quantize_dynamic,
    torch.ops.qtk.fake_quantize_float.default: fake_quantize_float.written_out,
}


def export(
    model: fx.GraphModule, call: Call, path: str | os.PathLike[str], *, target: str | None = None
) -> None:
    """Writes a simulated model as ``.pt2``; its dynamic dimensions stay dynamic.

    Args:
        model: the prepared model with its quantizers. It is exported in eval mode and not changed.
        call: a call of the model; the values do not matter.
        path: the file to write.
        target: the target that the file is for, in its extra file ``qtk.target``.

    Raises: ExportError if a quantizer has no encoding, or torch cannot export the model.
    """
    program = exported_program(model, call)
    for rule in _integer_rules(target):
        copy_float_operands(program.graph, rule)
    try:
        torch.export.save(program, path, extra_files=None if target is None else {TARGET: target})
    except Exception as error:
        raise ExportError(f"torch.export cannot save the program: {first_line(error)}; export formats=('onnx',)"
                          ) from error


def _integer_rules(target: str | None) -> list[NeighbourRule]:
    """The rules of a shipped target by which an op is computed in integers only if its result is quantized."""
    runtime = runtime_of_target(target)
    rules = () if runtime is None else runtime.rules
    return [rule for rule in rules if isinstance(rule, NeighbourRule) and rule.output == "quantized"]


def exported_program(
    model: fx.GraphModule, call: Call, *, constants: type[StoredSite] | type[UnfoldedSite] = StoredSite,
    one_row: bool = False,
) -> ExportedProgram:
    """The program that ``export`` writes; Args and Raises as there.

    Args:
        model: the prepared model with its quantizers.
        call: a call of the model.
        constants: how the program holds constants: as codes, or as floats that it quantizes and dequantizes.
        one_row: fix every axis to its length in ``call``, and the batch to one row; else dynamic axes stay dynamic.
    """
    if any(packed_call(node) or node.target is pack_padded for node in model.graph.nodes):
        raise ExportError("torch.export cannot capture loops over packed sequences; call the net with padded ones, or "
                          "export formats=('onnx',)")
    load_decomposed_ops()
    sites = {site.node: site for site in simulated_sites(model)}
    with evaluating(model), silent_torch(), torch.no_grad():
        written_out = _written_out(model, sites, constants)
        args, kwargs, shapes = _one_row(model.graph, call) if one_row else _example(model.graph, call)
        try:
            with lengths_stay_free():
                program = torch.export.export(written_out, args, kwargs, dynamic_shapes=shapes, strict=False)
            if _has_own_ops(program) or written_buffers(model.graph):  # which this makes outputs of the program
                program = program.run_decompositions(_PLAIN)
        except Exception as error:
            raise ExportError(f"torch.export cannot capture the simulation: {first_line(error)}") from error
    if not one_row:
        warn_of_fixed_axes(model.graph, program)
    warn_of_written_values(model)
    repeat_behind_movement(program.graph)
    dequantize_for_each_reader(program.graph)
    for node in program.graph.nodes:
        for key in _LOCAL:
            node.meta.pop(key, None)
    return program


def read(path: str | os.PathLike[str]) -> dict[str, Encoding]:
    """The encodings in a file that ``export`` wrote, bit for bit, in graph order; encodings in plain ATen are left out.

    Raises: ExportError if the file is no exported program.
    """
    return {name: encoding for name, encoding, _ in _stored_sites(path)}


def compare_with_simulation(path: Path, model: fx.GraphModule) -> None:
    """Reads a file back and compares encodings and stored integers with the simulation it was exported from.

    Raises: ExportError naming the site of the first difference.
    """
    sites = {site.name: site for site in simulated_sites(model) if _has_ops(site)}
    compare_stored_sites({name: (encoding, codes) for name, encoding, codes in _stored_sites(path)}, sites)


def _has_ops(site: SimulatedSite) -> bool:
    return has_ops(site.spec, None if site.constant is None else site.constant.shape)


def _written_out(
    model: fx.GraphModule, sites: Mapping[fx.Node, SimulatedSite], constants: type[StoredSite] | type[UnfoldedSite],
) -> fx.GraphModule:
    """A copy of ``model`` that calls a module of ``site_ops`` in place of each quantizer of ``sites``, none of others.

    Parameters are shared with ``model``, without parameters stored as codes. Quantizers stay at sites that
    ``site_ops`` has nothing for.
    """
    graph = copy.deepcopy(model.graph)
    copied = fx.GraphModule(model, graph)
    nodes = dict(zip(model.graph.nodes, graph.nodes, strict=True))
    _write_out(model, copied, nodes, sites, constants)
    for node in model.graph.nodes:
        composite = composite_called(node)
        if composite is not None:
            copied.set_submodule(str(node.target), _written_out_composite(composite, sites, constants))
    graph.eliminate_dead_code()
    _return_copies(graph)
    structure = call_structure(graph)
    if structure is not None and structure.out_spec is not None and _unknown_type(structure.out_spec):
        return_dict(graph, output_nodes(copied))
    return fx.GraphModule(copied, graph)  # holds only what the graph reads


def _return_copies(graph: fx.Graph) -> None:
    """Makes a graph return copies of the values that buffers take. Changes ``graph``.

    ``ExportedProgram.module()`` would return the buffers, which the next call changes.
    """
    output, buffers = graph.output_node(), written_buffers(graph).values()
    for value in dict.fromkeys(buffer.value for buffer in buffers):
        if output in value.users:
            with graph.inserting_before(output):
                copied = graph.call_function(torch.ops.aten.clone.default, (value,))
            copied.meta = dict(value.meta)
            output.replace_input_with(value, copied)


def _unknown_type(structure: pytree.TreeSpec) -> type | None:
    """The first type other than tuples, lists and dicts, which are what ``torch.export.save`` knows."""
    kind: type | None = structure.type
    if kind not in (None, tuple, list, dict):
        return kind
    return next(filter(None, map(_unknown_type, branches(structure))), None)


def _written_out_composite(
    composite: Composite, sites: Mapping[fx.Node, SimulatedSite], constants: type[StoredSite] | type[UnfoldedSite],
) -> nn.Module:
    copied = copy.deepcopy(composite)
    for before, after in zip(graphs(composite).values(), graphs(copied).values(), strict=True):
        nodes = dict(zip(before.graph.nodes, after.graph.nodes, strict=True))
        _write_out(before, after, nodes, sites, constants)
        after.recompile()
        after.delete_all_unused_submodules()
    return copied


def _write_out(
    original: fx.GraphModule, copied: fx.GraphModule, nodes: Mapping[fx.Node, fx.Node],
    sites: Mapping[fx.Node, SimulatedSite], constants: type[StoredSite] | type[UnfoldedSite],
) -> None:
    """Replaces the quantizers in ``copied``, a copy of ``original``; ``nodes``: node → its copy."""
    copied.add_module(_OPS, nn.Module())
    for call in quantizer_nodes(original):
        node, site = nodes[call], sites.get(call)
        if site is None:
            (value,) = node.args
            assert isinstance(value, fx.Node)
            node.replace_all_uses_with(value)
            node.graph.erase_node(node)
        elif (module := _module_for(site, constants)) is not None:
            node.target = f"{_OPS}.{site.name}"
            copied.add_submodule(node.target, module)
            if site.constant is not None:
                node.args = ()
    _copy_shared_biases(copied, list(nodes.values()))


def _copy_shared_biases(copied: fx.GraphModule, nodes: Iterable[fx.Node]) -> None:
    """Gives each layer that reads a bias, or another vector, its own copy.

    XNNPACK stores a bias as integers in the scale of its layer's products, once: of the first layer.
    """
    for node in nodes:
        value = attribute(copied, str(node.target)) if node.op == "get_attr" and not is_written(node) else None
        for index, reader in enumerate(list(node.users)[1:], 1):
            if isinstance(value, Tensor) and value.ndim == 1 and value.is_floating_point():
                name = f"again_{node.name}_{index}"
                copied.get_submodule(_OPS).register_buffer(name, value.detach().clone())
                with node.graph.inserting_after(node):
                    again = node.graph.get_attr(f"{_OPS}.{name}")
                again.meta = dict(node.meta)
                reader.replace_input_with(node, again)


def _module_for(
    site: SimulatedSite, constants: type[StoredSite] | type[UnfoldedSite]
) -> ComputedSite | StoredSite | UnfoldedSite | None:
    if site.encoding is None:
        return None
    if site.constant is not None:
        return constants(site.name, site.encoding, site.constant)
    if not has_ops(site.spec, None):
        return None
    return ComputedSite(site.name, site.encoding, site.node.meta["val"].ndim)


def _example(
    graph: fx.Graph, call: Call
) -> tuple[tuple[Any, ...], dict[str, Any], tuple[object, ...]]:
    """The arguments of ``call`` with dynamic axes of length 2 at least, and dynamic shapes for ``torch.export``."""
    axes = [file_axes(node) for node in graph.find_nodes(op="placeholder")]
    leaves = input_leaves(graph, call.args, call.kwargs)
    structure = call_structure(graph)
    unknown = None if structure is None else _unknown_type(structure.in_spec)
    if unknown is not None:
        raise ExportError(f"an input is a {unknown.__name__}, and torch.export.save knows tensors in tuples, lists and "
                          f"dicts alone; quantize a module that takes these and makes the {unknown.__name__} itself, "
                          "or export formats=('onnx',)")
    args = [doubled(leaf, each) for leaf, each in zip(leaves, axes, strict=True)]
    return _nested(structure, args, [dict.fromkeys(each, Dim.AUTO) or None for each in axes])


def _one_row(graph: fx.Graph, call: Call) -> tuple[tuple[Any, ...], dict[str, Any], tuple[object, ...]]:
    """The arguments of ``call`` with one row of the batch, and no dynamic shapes for ``torch.export``.

    The batch is the first axis of the first input in which that axis is free, and every free axis of its length.
    """
    placeholders = graph.find_nodes(op="placeholder")
    batch = next((str(node.meta["val"].shape[0]) for node in placeholders if 0 in free_axes(node)), None)
    args = []
    for leaf, node in zip(input_leaves(graph, call.args, call.kwargs), placeholders, strict=True):
        for axis in free_axes(node):
            if isinstance(leaf, Tensor) and str(node.meta["val"].shape[axis]) == batch:
                leaf = leaf.narrow(axis, 0, 1)
        args.append(leaf.clone() if isinstance(leaf, Tensor) else leaf)
    return _nested(call_structure(graph), args, [None] * len(args))


def _nested(
    structure: CallStructure | None, args: list[object], shapes: list[object]
) -> tuple[tuple[Any, ...], dict[str, Any], tuple[object, ...]]:
    """Arguments and their shapes, nested as the model takes them."""
    if structure is None:
        return tuple(args), {}, tuple(shapes)
    positional, named = pytree.tree_unflatten(args, structure.in_spec)
    of_positional, of_named = pytree.tree_unflatten(shapes, structure.in_spec)
    return positional, named, (*of_positional, *of_named.values())


def _has_own_ops(program: ExportedProgram) -> bool:
    return any(getattr(node.target, "namespace", None) == "qtk" for node in program.graph.nodes)


def _stored_sites(path: str | os.PathLike[str]) -> Iterator[tuple[str, Encoding, Tensor | None]]:
    """Name, encoding and, of a constant, the stored codes of each site that has ops; once for a site in a loop."""
    load_decomposed_ops()
    try:
        program = torch.export.load(path)
    except Exception as error:
        raise ExportError(f"cannot read {path} as an exported program: {first_line(error)}") from error
    signature = program.graph_signature
    kept: dict[str | None, Any] = {**program.state_dict, **program.constants}
    targets = {**signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants}
    seen: set[str] = set()
    for node in program.graph.nodes:
        name, spec = label(node, SITE), label(node, SPEC)
        if not is_dequantize(node) or name is None or spec is None or name in seen:
            continue
        seen.add(name)
        arguments = [kept.get(targets.get(each.name)) if isinstance(each, fx.Node) else each for each in node.args]
        codes, scale, zero_point, *_ = (each.cpu() if isinstance(each, Tensor) else each for each in arguments)
        yield name, _encoding(QuantSpec.from_json(json.loads(spec)), scale, zero_point), codes


def _encoding(spec: QuantSpec, scale: object, zero_point: object) -> Encoding:
    """The encoding of the arguments of an op: tensors, or numbers per tensor."""
    scales, zero_points = (each if isinstance(each, Tensor) else torch.tensor([each]) for each in (scale, zero_point))
    return Encoding(spec, scales.to(torch.float32), None if spec.symmetric else zero_points.to(torch.int32))

