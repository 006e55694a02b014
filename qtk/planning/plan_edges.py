"""Rules 7, 12 and 14 of the planner: quantizers on the edges into ops that need another spec than the producer has."""

from __future__ import annotations

from torch import fx

from qtk.graph.flow import maker
from qtk.graph.sites import Port, edge_site
from qtk.operators.op_row import OpRow, Role
from qtk.planning.decision import Decision
from qtk.planning.draft import Draft, agrees


def plan_edges(draft: Draft) -> None:
    """Puts a quantizer on the edge into a compute op whose ``input`` setting differs from the value it reads.

    So also into an op with weights, or a matrix product, that reads a value which a rule with ``feeds`` set for others.

    Requires: values, parameters and merges are decided.
    Ensures: every data input whose ``input`` setting a rule enables has its spec, at the producer or in ``edges``.
    """
    for node in draft.graph.nodes:
        row = draft.flow.row(node)
        if row is None or row.role is not Role.COMPUTE or node in draft.formulas:
            continue
        decision = draft.decisions(node).input
        if decision is draft.rules.activation:
            _plan_held(draft, node)
            _plan_streams(draft, node, row)
        else:  # a rule sets its inputs
            for port in draft.flow.data_ports(node):
                _plan_input(draft, port, decision, f"input of {row.kind}")


def _plan_input(draft: Draft, port: Port, decision: Decision, why: str) -> None:
    if decision.setting.is_dynamic and draft.flow.is_static(port.value):
        return  # rule 4
    keys = (edge_site(port), draft.flow.root(port.value))
    if not decision.enabled:
        draft.request("input", decision, keys, None)
        return
    wanted = draft.site_plan(draft.activation_spec(port.value, decision), decision, why)
    present = draft.values.get(draft.flow.root(port.value))
    if present is None or not agrees(present, wanted, decision):
        draft.edges[edge_site(port)] = wanted
    draft.request("input", decision, keys, wanted)


def _plan_held(draft: Draft, node: fx.Node) -> None:
    """Decides the inputs that stay in float at their producers, for an excluded module that reads them too."""
    for port in draft.flow.data_ports(node):
        plan = draft.held.get(draft.flow.root(port.value))
        if plan is not None:
            draft.edges[edge_site(port)] = plan
            draft.share_edge(port, edge_site(port))


def _is_quantized_inside(draft: Draft, node: fx.Node) -> bool:
    """Whether a recurrent net computes with codes inside, so that it reads codes whatever it is fed as."""
    return any(inner.profile not in ("float", "dynamic") for inner in draft.nested.get(node, ()))


def _plan_streams(draft: Draft, node: fx.Node, row: OpRow) -> None:
    """Decides the inputs that are values of a stream, where ``node`` is not what the stream feeds."""
    for port in draft.flow.data_ports(node) if row.multiplies else ():
        source = draft.flow.root(port.value)
        stream = None if draft.flow.is_static(source) else draft.decisions(maker(source)).stream
        if stream is None or (not stream.feeds.isdisjoint(row.names) and not _is_quantized_inside(draft, node)):
            continue
        _plan_input(draft, port, stream.elsewhere, f"input of {row.kind}")
        if (site := edge_site(port)) in draft.edges:
            draft.share_edge(port, site)
