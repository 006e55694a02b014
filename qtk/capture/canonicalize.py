"""Turns an exported program into canonical form: functional ATen ops, and modules for ops that differ in training."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from qtk.capture.buffer_writes import detach_writes, part_from_buffers
from qtk.capture.embedding_bags import open_bags
from qtk.capture.holders import constants_of, hold, hold_constants
from qtk.capture.parameter_writes import drop_parameter_writes
from qtk.capture.recover import recover
from qtk.capture.train_mode.train_only import TrainOnly
from qtk.core.needs import found_where
from qtk.graph.captured_graph import CONSTANTS, CapturedGraph
from qtk.graph.sites import is_float, name_sites
from qtk.nn.scan import Scan
from qtk.operators.contents import Trait, contents
from qtk.operators.lookup import row_of
from qtk.operators.targets import MEMBERS, attribute, path_of
from qtk.torch_private import GRAPH_MODULE_NAMES, OpOverload

Captured = TypeVar("Captured", bound=CapturedGraph)

CHECKS = ("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range")

CLAMPS = (torch.ops.aten.clamp.default, torch.ops.aten.clamp_min.default, torch.ops.aten.clamp_max.default)
"""Ops on floats whose whole bounds torch's ONNX exporter writes in other operators than others, or not at all."""

VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
"""Ops that demand the strides seen at capture; modules put into the graph later may return others."""

PRODUCTS: Mapping[object, tuple[int, ...]] = {
    torch.ops.aten.matmul.default: (0, 1), torch.ops.aten.mm.default: (0, 1), torch.ops.aten.addmm.default: (1, 2, 0)}
"""Products of matrices → where they have the arguments of ``linear``."""

TRANSPOSE = "transpose"

SLICE, SLICE_SCATTER = torch.ops.aten.slice.Tensor, torch.ops.aten.slice_scatter.default


def canonicalize(
    program: ExportedProgram,
    original: nn.Module,
    kind: type[Captured],
    *,
    place: str = "",
    train_only: TrainOnly = MappingProxyType({}),
    scans: Sequence[Scan] = (),
) -> tuple[Captured, tuple[tuple[str, int], ...]]:
    """Builds the captured graph of ``original`` from its exported program.

    Restores the train mode of dropout and batch norm, replaces recurrent ops and attention by composites, drops shape
    guards and unused reads, and names every site.

    Args:
        program: the exported program, with marker ops.
        original: the module it was exported from.
        kind: class of the graph.
        place: module path of ``original`` in the whole model.
        train_only: the modules that were captured as ops.
        scans: the recurrences that were.

    Returns: the graph, and the number of modules recovered of each kind.
    """
    from qtk.capture.fresh_constants import drop_empty_operands

    root = hold(original)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _rename_hidden(program)
        captured = program.module(check_guards=False)
    assert isinstance(captured, fx.GraphModule)
    hold_constants(root, captured)
    graph = captured.graph
    for node in list(graph.nodes):
        if node.op == "get_attr":
            node.target = path_of(node.target)
        if any(name in str(node.target) for name in CHECKS) or (node.op == "get_attr" and not node.users):
            graph.erase_node(node)
        elif node.target in VIEWS:
            node.target = torch.ops.aten.reshape.default
        elif node.target is torch.ops.aten.copy.default:
            _replace_copy(node)
        elif node.target in CLAMPS and is_float(node):
            node.args = (node.args[0], *(float(end) if type(end) is int else end for end in node.args[1:]))
        elif _takes_all(node):  # x[:]
            node.replace_all_uses_with(node.args[0 if node.target is SLICE else 1])
            graph.erase_node(node)
    drop_empty_operands(graph)
    open_bags(graph)
    swaps = recover(root, graph, original, train_only, scans)
    for node in list(graph.nodes):
        if node.target in PRODUCTS:
            _make_linear(node, root)
    graph.owning_module = root  # type: ignore[assignment]  # where dead code is told from calls that matter
    found_where({Trait.WRITES}, contents(graph.nodes), lambda: _replace_writes(graph, root, place), None)
    graph.eliminate_dead_code()
    captured_graph = kind(root, graph)
    captured_graph.meta[CONSTANTS] = constants_of(original)
    name_sites(captured_graph.graph, place)
    return captured_graph, swaps


def _replace_writes(graph: fx.Graph, root: nn.Module, place: str) -> None:
    drop_parameter_writes(graph, root)
    part_from_buffers(graph)
    detach_writes(graph, root, inputs_carry=bool(place))


def _rename_hidden(program: ExportedProgram) -> None:
    """Puts ``MEMBERS`` before the names of parameters, buffers and constants that a module of torch's cannot have."""
    own = fx.GraphModule({}, fx.Graph())
    signature = program.graph_signature
    for spec in (*signature.input_specs, *signature.output_specs):
        name = (spec.target or "").partition(".")[0]
        if name and (hasattr(own, name) or name in GRAPH_MODULE_NAMES):
            target = f"{MEMBERS}.{spec.target}"
            for table in (program.state_dict, program.constants):
                if spec.target in table:
                    table[target] = table.pop(spec.target)
            spec.target = target


def _takes_all(node: fx.Node) -> bool:
    """Says whether a slice, or a write into one, covers its whole axis, as ``:`` does in ``x[:, 1]``."""
    if node.target not in (SLICE, SLICE_SCATTER):
        return False
    defaults: tuple[fx.node.Argument, ...] = (0, None, None, 1)
    passed = node.args[1 if node.target is SLICE else 2 :]
    bounds = (*passed, *defaults[len(passed) :])[1:]
    return bounds in ((0, sys.maxsize, 1), (None, None, 1), (0, None, 1), (None, sys.maxsize, 1)) and not node.kwargs


def _make_linear(node: fx.Node, root: nn.Module) -> None:
    """Turns the product with a parameter that has been transposed, ``x @ weight.T``, into ``linear(x, weight)``."""
    data, turned, *bias = (node.args[index] for index in PRODUCTS[node.target])
    row = row_of(turned) if isinstance(turned, fx.Node) else None
    if node.kwargs or not isinstance(turned, fx.Node) or row is None or row.kind != TRANSPOSE:
        return
    read, value = turned.args[0], turned.meta["val"]
    if not isinstance(read, fx.Node) or read.op != "get_attr":
        return
    weight = attribute(root, str(read.target))
    if not isinstance(weight, nn.Parameter) or not weight.is_floating_point() or weight.ndim != 2 or value.ndim != 2:
        return
    is_turned = (value.shape, value.stride()) == (weight.shape[::-1], weight.stride()[::-1])
    if is_turned and all(isinstance(each, fx.Node) and each.meta["val"].shape == weight.shape[:1] for each in bias):
        node.target, node.args = torch.ops.aten.linear.default, (data, read, *bias)


def _replace_copy(node: fx.Node) -> None:
    """Replaces ``copy(into, value)``, which has no gradient, by ``value`` cast and expanded."""
    into, value = node.args
    assert isinstance(into, fx.Node)
    assert isinstance(value, fx.Node)
    target, source = node.meta["val"], value.meta["val"]
    with node.graph.inserting_before(node):
        if source.shape != target.shape:
            value = _call(node, torch.ops.aten.expand_as.default, (value, into), {})
        if source.dtype != target.dtype:
            value = _call(node, torch.ops.aten._to_copy.default, (value,), {"dtype": target.dtype})
    node.replace_all_uses_with(value)
    node.graph.erase_node(node)


def _call(
    like: fx.Node, op: OpOverload, args: tuple[fx.Node, ...], kwargs: dict[str, torch.dtype]
) -> fx.Node:
    node = like.graph.create_node("call_function", op, args, dict(kwargs))
    node.meta = {**like.meta, "val": op(*(arg.meta["val"] for arg in args), **kwargs)}
    return node
