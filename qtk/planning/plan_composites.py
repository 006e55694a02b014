"""Rule 10 of the planner: quantizes the graphs inside composites."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import fx

from qtk.capture.composites import composite_called
from qtk.core.granularity import PerBlock
from qtk.graph.flow import maker
from qtk.graph.graphs import nested_graphs
from qtk.graph.sites import EXCLUDED, edge_site, is_float, label, ports, value_site
from qtk.nn.recurrent import Recurrent, RecurrentCell
from qtk.operators.targets import packed_call
from qtk.planning.draft import Draft
from qtk.planning.recurrent_profiles import DYNAMIC, Profile
from qtk.planning.rules import Matchable, to_spec


def plan_composites(draft: Draft, run_passes: Callable[[Draft], None]) -> None:
    """Plans every graph inside a composite (attention, a recurrent net) with the same passes.

    Requires: nothing.
    Ensures: ``nested`` has a finished draft for each such graph; ``misfits`` has their lines too. Where a rule says
    ``inside: float``, all their values are in ``floats``; where it says ``dynamic``, all but what products read.
    """
    for node in draft.graph.nodes:
        if not label(node, EXCLUDED):
            _plan_composite(draft, node, run_passes)


def _plan_composite(draft: Draft, node: fx.Node, run_passes: Callable[[Draft], None]) -> None:
    graphs, composite = nested_graphs(node), composite_called(node)
    if not graphs:
        return
    joined = composite.joined_parts if isinstance(composite, Recurrent) else ()
    last = list(graphs)[-1]
    results = {last}.union(*(pair for pair in joined if last in pair))
    excluded = _excluded_reader(draft, node)
    profiles = {part.part: _profile(draft, part) for part in draft.parts(node)}
    nested: dict[str, Draft] = {}
    for path, graph in graphs.items():
        profile, reason = profiles[path.rpartition(".")[0]]
        nested[path] = inner = Draft(
            graph.graph, draft.rules, draft.scheme, None, profile=profile,
            float_outputs=excluded if path in results else None,
        )
        if profile in ("float", "dynamic"):
            inner.floats |= {value: f"inside is {reason}" for value in inner.graph.nodes if _is_computed(value)}
            if profile == "dynamic":
                _plan_products(inner, reason)
        else:
            run_passes(inner)
            draft.misfits += inner.misfits
    for first, second in joined:
        if {first, second} <= nested.keys():
            _share_result(nested[first], nested[second])
    draft.nested[node] = list(nested.values())


def _profile(draft: Draft, part: Matchable) -> tuple[Profile, str]:
    """Says how the values in a part of a composite are quantized, and why."""
    profile, said_by = draft.rules.inside(part)
    missing = _without_kernel(draft, part) if profile == "dynamic" else None
    if missing is not None:
        return "float", f"float, for no dynamic kernel computes {missing}"
    return profile, f"{profile} by {said_by}"


def _without_kernel(draft: Draft, part: Matchable) -> str | None:
    """Returns why ONNX Runtime has no dynamic kernel for this part of a net; ``None`` if it has one."""
    node = part.node
    composite = composite_called(node)
    if not isinstance(composite, Recurrent | RecurrentCell) or composite.kind != "lstm":
        return composite.kind if isinstance(composite, Recurrent | RecurrentCell) else "attention"
    if isinstance(composite, Recurrent) and composite.projected:
        return "projected states"
    if packed_call(node):
        return "packed sequences"
    (data, *_) = ports(node)
    if data.value.meta["val"].dtype != torch.float32:
        return str(data.value.meta["val"].dtype).removeprefix("torch.")
    weights = [draft.of_parameter(port).weight for port in draft.flow.weight_ports(node)
               if draft.parameter(port).part == part.part]
    activation, *specs = (
        to_spec(decision.setting, axes, 2) if decision.enabled else None
        for decision, axes in ((draft.rules.activation, None), *((weight, (0, 1)) for weight in weights))
    )
    if activation is None or activation.dtype.name not in ("uint8", "int8"):
        return f"activations of {'float' if activation is None else activation.dtype}"
    for weight in specs:
        if weight is None or weight.dtype.name != "int8" or isinstance(weight.granularity, PerBlock):
            return f"weights of {'float' if weight is None else weight}"
    return None


def _plan_products(inner: Draft, reason: str) -> None:
    """Quantizes what the products of a step multiply their weights with: the input, and the hidden state."""
    decision = inner.rules.activation.overlaid(DYNAMIC, reason)
    for node in inner.graph.nodes:
        row = inner.flow.row(node)
        if row is None or not row.multiplies:
            continue
        for port in inner.flow.data_ports(node):
            spec = to_spec(decision.setting, None, port.value.meta["val"].ndim)
            inner.edges[edge_site(port)] = inner.site_plan(spec, decision, f"input of {row.kind}")


def _excluded_reader(draft: Draft, node: fx.Node) -> str | None:
    """Says why the values that a composite returns stay in float: an excluded module reads one (rule 14)."""
    values = [node, *(user for user in node.users if maker(user) is node)]
    return next((reason for value in values if (reason := draft.excluded_reader(value))), None)


def _is_computed(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_module") and is_float(node)


def _share_result(leading: Draft, following: Draft) -> None:
    """Gives the first outputs of two graphs, which the composite concatenates, one encoding if both are quantized."""
    leader, follower = (draft.flow.root(draft.graph.output_node().all_input_nodes[0]) for draft in (leading, following))
    if follower in following.values and leader in leading.values and not leading.values[leader].spec.dynamic:
        site = value_site(leader)
        following.values[follower] = replace(leading.values[leader], leader=site, reason=f"joined with {site}")
