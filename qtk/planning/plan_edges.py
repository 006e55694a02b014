"""Rule 7 of the planner: a quantizer on the edge into an op whose rule asks for another spec than the producer's."""

from __future__ import annotations

from torch import fx

from qtk.graph.op_row import OpRow, Role
from qtk.graph.sites import edge_site
from qtk.planning.draft import Draft
from qtk.planning.rules import Decision, to_spec


def plan_edges(draft: Draft) -> None:
    """Puts a quantizer on the edge into a compute op whose ``input`` setting differs from the value it reads.

    Requires: values, parameters and merges are decided.
    Ensures: every data input whose ``input`` setting a rule enables has its spec, at the producer or in ``edges``.
    """
    for node in draft.graph.nodes:
        row = draft.flow.row(node)
        if row is None or row.role is not Role.COMPUTE or node in draft.formulas:
            continue
        decision = draft.rules.decisions(node, draft.flow).input
        if decision.enabled and decision is not draft.rules.activation:  # a rule sets its inputs
            _plan_inputs(draft, node, row, decision)


def _plan_inputs(draft: Draft, node: fx.Node, row: OpRow, decision: Decision) -> None:
    for port in draft.flow.data_ports(node):
        if decision.setting.is_dynamic and draft.flow.is_static(port.value):
            continue  # rule 4
        present = draft.values.get(draft.flow.root(port.value))
        spec = to_spec(decision.setting, None, port.value.meta["val"].ndim)
        if present is None or present.spec != spec:
            draft.edges[edge_site(port)] = draft.site_plan(spec, decision, f"input of {row.kind}")
