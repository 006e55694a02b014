"""Rule 10 of the planner: quantizes the graphs inside composites."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import fx

from qtk.capture.composites import composite_called
from qtk.graph.flow import maker
from qtk.graph.graphs import nested_graphs
from qtk.graph.sites import EXCLUDED, is_float, label, value_site
from qtk.nn.recurrent import Recurrent
from qtk.planning.draft import Draft


def plan_composites(draft: Draft, run_passes: Callable[[Draft], None]) -> None:
    """Plans every graph inside a composite (attention, a recurrent net) with the same passes.

    Requires: nothing.
    Ensures: ``nested`` has a finished draft for each such graph; ``misfits`` has their lines too. Where a rule says
    ``inside: float``, all their values are in ``floats``.
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
    profile, said_by = draft.rules.inside(draft.matchable(node))
    nested = {
        path: Draft(graph.graph, draft.rules, draft.scheme, None, profile=profile,
                    float_outputs=excluded if path in results else None)
        for path, graph in graphs.items()
    }
    if profile == "float":
        for inner in nested.values():
            inner.floats |= {
                value: f"inside is float by {said_by}" for value in inner.graph.nodes if _is_computed(value)
            }
        draft.nested[node] = list(nested.values())
        return
    for inner in nested.values():
        run_passes(inner)
        draft.misfits += inner.misfits
    for first, second in joined:
        if {first, second} <= nested.keys():
            _share_result(nested[first], nested[second])
    draft.nested[node] = list(nested.values())


def _excluded_reader(draft: Draft, node: fx.Node) -> str | None:
    """Why the values that a composite returns stay in float: an excluded module reads one (rule 14)."""
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
