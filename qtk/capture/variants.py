"""Joins several graphs of one module, one for each kind of call: rank, dtype, with or without a mask or labels."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, fx, nn

from qtk.calls.calls import Call, leaves_text
from qtk.calls.signature import Kind
from qtk.capture.composites import Composite
from qtk.capture.correspondence import Pairs, corresponding
from qtk.capture.free_shapes import DynamicShapes, LeafAxis
from qtk.capture.holders import Holder, holder, replace_module
from qtk.capture.prepared_model import CAPTURED, KIND, KNOWN, REPORT, PreparedGraph, PreparedModel
from qtk.capture.verify_prepared import RunResult, eval_difference
from qtk.errors import CaptureError
from qtk.graph.arithmetic import arithmetic_digest
from qtk.graph.captured_graph import VARIANTS, CapturedGraph
from qtk.graph.graphs import graphs
from qtk.graph.sites import OP, OWNER, add_labels, join, label, name_sites, op_kind, value_site
from qtk.nn.batch_norm import BatchNorm
from qtk.nn.dropout import Dropout
from qtk.nn.instance_norm import InstanceNorm
from qtk.nn.scan import Scan
from qtk.operators.lookup import row_of
from qtk.operators.targets import attribute, called_module, path_of
from qtk.torch_private import DropoutBase, pytree

ADDED = (*Composite.__args__, BatchNorm, Dropout, InstanceNorm, Scan)
"""Modules that capture adds to the modules of the original."""


def refuse_explicit_shapes(dynamic_shapes: DynamicShapes) -> None:
    """Raises: CaptureError if variants were given with explicit dynamic shapes, which describe one graph."""
    if dynamic_shapes not in ("batch", "all", None):
        raise CaptureError("explicit dynamic_shapes describe one graph, and variants need one for each kind of "
                           "call; give 'batch', 'all' or None")


def refuse_equal_kinds(kinds: Sequence[Kind], calls: Sequence[Call]) -> None:
    """Refuses a variant that the graph of an earlier call serves.

    Args:
        kinds: of each call its kind, with the sizes that its graph serves where each has one.
        calls: the example and the variants.

    Raises: CaptureError naming both.
    """
    seen: dict[Kind, int] = {}
    for index, (kind, call) in enumerate(zip(kinds, calls, strict=True)):
        earlier = seen.setdefault(kind, index)
        if earlier != index:
            of = "example_inputs" if earlier == 0 else f"variants[{earlier - 1}]"
            raise CaptureError(f"variants[{index - 1}] ({leaves_text((call.args, call.kwargs))}) is a call of the same "
                               f"kind as {of}: equal inputs given, of equal ranks and dtypes, with equal flags; "
                               "one graph serves both, leave it out")


def serving(graph: PreparedGraph) -> Kind:
    """The kind of the calls that a graph serves, with the sizes that it serves."""
    return _free(graph), tuple(map(str, graph.sizes.limits))


def _free(graph: PreparedGraph) -> Kind:
    return graph.meta[KIND], frozenset(vars(graph)[CAPTURED].items())


def served_by_others(captured: Sequence[PreparedGraph], calls: Sequence[Call]) -> dict[int, frozenset[LeafAxis]]:
    """The numbers of calls that the graph of another call serves too, with their axes that have length 1 there alone.

    Such a call, as of one token beside one of several, may have a graph that computes less. Of two calls that differ so
    along several axes it is the call whose first such axis, behind the batch, has length 1.
    """
    found: dict[int, frozenset[LeafAxis]] = {}
    for index, call in enumerate(calls):
        for graph, other in zip(captured, calls, strict=True):
            shorter, longer = _ones(call, other), _ones(other, call)
            is_first = shorter and (not longer or min(shorter) < min(longer))
            if is_first and _free(graph) == _free(captured[index]) and graph.refusal(call.args, call.kwargs) is None:
                found.setdefault(index, frozenset(shorter))
    return found


def _ones(call: Call, other: Call) -> set[LeafAxis]:
    """The axes, behind the batch, that have length 1 in a call and another one in another call of its kind."""
    pairs = zip(*(pytree.tree_leaves((each.args, each.kwargs)) for each in (call, other)), strict=False)
    return {(number, axis) for number, (mine, its) in enumerate(pairs)
            if isinstance(mine, Tensor) and isinstance(its, Tensor) and mine.ndim == its.ndim
            for axis in range(1, mine.ndim) if mine.shape[axis] == 1 != its.shape[axis]}


def join_variants(
    model: nn.Module, graphs_of_calls: Sequence[PreparedModel], calls: Sequence[Call], expected: Sequence[RunResult]
) -> None:
    """Makes the first of the graphs serve all calls. Changes them.

    Raises: VerificationError if it computes anything else than the model.
    """
    main, *others = graphs_of_calls
    assert isinstance(main, PreparedGraph)
    reports = [graph.report for graph in graphs_of_calls]
    for other in others:
        assert isinstance(other, PreparedGraph)
        add_variant(main, other.meta[KIND], other)
    differences = [eval_difference(model, main, call.args, call.kwargs, expected=outcome)
                   for call, outcome in zip(calls, expected, strict=False)]
    main.meta[REPORT] = replace(
        main.report,
        dynamic=all(report.dynamic for report in reports),
        reasons=_reasons([report.reasons for report in reports]),
        eval_difference=max(differences) if differences else None,
        unknown_ops=tuple(dict.fromkeys(name for report in reports for name in report.unknown_ops)),
        opaque_parts=tuple(dict.fromkeys(part for report in reports for part in report.opaque_parts)),
    )


def _reasons(of_graphs: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """The reasons of several graphs, each with the calls whose graphs have it, where not all graphs do."""
    names = ["example_inputs", *(f"variants[{index}]" for index in range(len(of_graphs) - 1))]
    every = dict.fromkeys(reason for reasons in of_graphs for reason in reasons)
    of_reason = {reason: [name for name, reasons in zip(names, of_graphs, strict=True) if reason in reasons]
                 for reason in every}
    return tuple(reason if len(calls) == len(of_graphs) else f"{reason} ({', '.join(calls)})"
                 for reason, calls in of_reason.items())


def add_variant(main: CapturedGraph, kind: Kind, other: CapturedGraph) -> None:
    """Makes ``main`` pass calls of ``kind`` to ``other``, another graph of the same module. Changes both.

    Afterwards both share one set of parameters, buffers, submodules and, once inserted, quantizers: an op that both
    have is one site, whatever stands before it in one of them, and what only one has gets names of its own.
    """
    _rename_constants(main, other)
    earlier = [main.graph, *(graph.graph for graph in main.variants.values())]
    pairs = _name_as(earlier, other.graph)
    _take_over(main, other, pairs)
    _move(main, other, main)
    other.adopt(main.__dict__)
    other.recompile()
    variants = main.meta.setdefault(VARIANTS, {})
    variants[kind if kind not in variants and kind != main.meta.get(KIND) else (kind, len(variants))] = other
    vars(main).pop(KNOWN, None)


def _rename_constants(main: CapturedGraph, other: CapturedGraph) -> None:
    """Gives constants that ``main`` has too the names they have there, and names of their own to all others.

    A buffer of the original is no constant, whatever its value now: it may be trained, loaded or written to.
    """
    mine, theirs = (dict(graph.named_buffers(remove_duplicate=False)) for graph in (main, other))
    originals = {name for name, value in mine.items() if theirs.get(name) is value}
    twins = [name for name in mine if name not in originals and _is_constant(main, name)]
    constants = {name: value for name, value in theirs.items() if _is_constant(other, name)}
    new_names: dict[str, str] = {}
    for name, value in constants.items():
        same_stem = (twin for twin in twins if _stem(twin) == _stem(name) and twin not in new_names.values())
        candidates = [name] if name in originals else sorted(same_stem, key=lambda twin: twin != name)
        same = next((twin for twin in candidates if _equal(mine[twin], value)), None)
        taken = {*mine, *theirs, *new_names.values()}
        new_names[name] = same or (_free_name(taken, name) if name in mine else name)
    for node in other.graph.find_nodes(op="get_attr"):
        if path_of(node.target) in new_names:
            node.target = other.target(new_names[path_of(node.target)])
    for name in constants:
        owner, leaf = _split(other, name)
        delattr(owner, leaf)
    for name, new_name in new_names.items():
        owner, leaf = _split(other, new_name)
        owner.register_buffer(leaf, constants[name], persistent=False)


def _split(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    owner, _, leaf = name.rpartition(".")
    return holder(root, owner), leaf


def _is_constant(graph: CapturedGraph, name: str) -> bool:
    owner, leaf = _split(graph, name)
    return leaf in owner._non_persistent_buffers_set


def _equal(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.dtype == b.dtype and not a.is_meta and not b.is_meta and torch.equal(a, b))


def _stem(name: str) -> str:
    return re.sub(r"_?\d+$", "", name)


def _free_name(taken: Collection[str], name: str) -> str:
    """``stem_1``, ``stem_2``, …: the first that is not taken."""
    ordinal = 1
    while f"{_stem(name)}_{ordinal}" in taken:
        ordinal += 1
    return f"{_stem(name)}_{ordinal}"


def _name_as(earlier: list[fx.Graph], graph: fx.Graph) -> Pairs:
    """Labels the ops of ``graph`` as the same ops of ``earlier`` graphs. Returns: the same op of each, if there is."""
    taken = {_name(node) for each in earlier for node in each.nodes if label(node, OWNER) is not None}
    pairs: Pairs = {}
    given: set[str] = set()
    for each in earlier:
        for node, same in corresponding(each, graph).items():
            if label(same, OWNER) is not None and node not in pairs and _name(same) not in given:
                pairs[node] = same
                given.add(_name(same))
    for node in graph.nodes:
        if label(node, OWNER) is None:
            continue
        if node in pairs:
            add_labels(node, **{key: label(pairs[node], key) or "" for key in (OWNER, OP)})
            continue
        if _name(node) in taken:
            owner = label(node, OWNER) or ""
            stem = join(owner, re.sub(r"_\d+$", "", label(node, OP) or op_kind(node)))
            name = stem if stem not in taken else _free_name(taken, f"{stem}_0")
            add_labels(node, **{OP: name.removeprefix(f"{owner}.")})
        taken.add(_name(node))
    return pairs


def _name(node: fx.Node) -> str:
    return join(label(node, OWNER) or "", label(node, OP) or "")


def _take_over(main: CapturedGraph, other: CapturedGraph, pairs: Pairs) -> None:
    """Lets ``other`` use the modules that capture added to ``main`` where they are the same, and renames its others."""
    uses = {node: module for node in other.graph.nodes if isinstance(module := _module_used(node), ADDED)}
    for node in uses:
        owner, leaf = _split(other, path_of(node.target))
        owner._modules.pop(leaf, None)
    taken = {name for graph in (main, other) for name, _ in graph.named_modules(remove_duplicate=False)}
    for node, module in uses.items():
        reader = next(iter(node.users)) if node.op == "get_attr" else node
        same = pairs.get(reader)
        twin_node = None if same is None else _use_in(same)
        twin = None if twin_node is None else _module_used(twin_node)
        if twin is not None and repr(twin) == repr(module) and arithmetic_digest(twin) == arithmetic_digest(module):
            assert twin_node is not None
            node.target = twin_node.target
            continue
        path = path_of(node.target)
        path = _free_name(taken, path) if path in taken else path
        taken.add(path)
        owner, leaf = _split(other, path)
        owner.add_module(leaf, module)
        node.target = other.target(path)
        _name_inside(node, module, twin)


def _name_inside(node: fx.Node, module: nn.Module, twin: nn.Module | None) -> None:
    """Names the sites inside a composite, as in the main graph where its composite has them too."""
    row, place = row_of(node), value_site(node).name.partition(":")[0]
    twins: Mapping[str, CapturedGraph] = {} if twin is None else graphs(twin)
    for path, inside in graphs(module).items():
        name_sites(inside.graph, f"{place}.{path}", "" if row is None else row.inside or "")
        if path in twins:
            _name_as([twins[path].graph], inside.graph)
            for name, child in twins[path].named_children():  # a probability that is set acts in both
                if isinstance(child, DropoutBase) and repr(inside._modules.get(name)) == repr(child):
                    inside._modules[name] = child


def _use_in(node: fx.Node) -> fx.Node | None:
    """The node by which an op uses a module that capture added."""
    uses = [node, *node.all_input_nodes]
    return next((use for use in uses if isinstance(_module_used(use), ADDED)), None)


def _module_used(node: fx.Node) -> nn.Module | None:
    """The module that a node calls, or reads for an op that calls it."""
    owner = node.graph.owning_module
    if node.op != "get_attr" or owner is None:
        return called_module(node)
    value = attribute(owner, str(node.target))
    return value if isinstance(value, nn.Module) else None


def _move(mine: nn.Module, theirs: nn.Module, root: nn.Module) -> None:
    """Copies into ``mine``, in the tree of ``root``, every parameter, buffer and child that only ``theirs`` has."""
    mine._non_persistent_buffers_set |= theirs._non_persistent_buffers_set
    for table in ("_parameters", "_buffers"):
        for name, value in theirs.__dict__[table].items():
            mine.__dict__[table].setdefault(name, value)
    for name, child in theirs._modules.items():
        twin = mine._modules.setdefault(name, child)
        if twin is None or child is None or twin is child:
            continue
        if isinstance(twin, Holder) and not isinstance(child, Holder):  # one that acts, in the other graph alone
            replace_module(root, twin, child)
            twin, child = child, twin
        _move(twin, child, root)
