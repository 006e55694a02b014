"""The unfinished plan of one graph, which the passes of the planner read and write."""

from __future__ import annotations

from torch import fx

from qtk.config.schema import Io
from qtk.core.plan import SitePlan
from qtk.core.site import Site
from qtk.core.spec import QuantSpec
from qtk.graph.counts import Nature, natures
from qtk.graph.flow import Flow
from qtk.graph.op_row import Role
from qtk.graph.op_table import op_name
from qtk.graph.sites import Port, edge_site, is_float, ports, value_site
from qtk.planning.feeds import Feeds
from qtk.planning.image_gates import GATED, is_image_gate
from qtk.planning.patterns import PatternMatch, match_patterns
from qtk.planning.rules import Decision, OpDecisions, Rules, to_spec


class Draft:
    """The decisions made so far about the values of one graph; the graph itself does not change.

    ``values``: node → plan of its value. ``edges``: site of an edge → its plan. ``floats``: node whose value stays in
    float → reason. ``nested``: call of a composite → drafts of the graphs inside it. ``misfits``: a line for every
    tensor whose shape does not fit its granularity. ``formulas``: op → the match of the formula that it is part of.

    Args:
        graph: the graph.
        rules: the configuration.
        scheme: the default scheme.
        io: whether the graph's inputs and outputs are quantized; ``None`` for a graph inside a composite: its inputs
            are quantized outside, and no formulas are matched in it.
    """

    def __init__(self, graph: fx.Graph, rules: Rules, scheme: str, io: Io | None) -> None:
        self.graph = graph
        self.rules = rules
        self.scheme = scheme
        self.io = io
        self.flow = Flow(graph)
        matches = [match for match in match_patterns(graph) if not self._is_split(match)] if io is not None else []
        self.formulas = {node: match for match in matches for node in match.nodes}
        self._natures = natures(graph, self.flow)
        self.feeds = Feeds(graph, self.flow, self.formulas)
        self.nested: dict[fx.Node, list[Draft]] = {}
        self.values: dict[fx.Node, SitePlan] = {}
        self.edges: dict[Site, SitePlan] = {}
        self.floats: dict[fx.Node, str] = {}
        self.misfits: list[str] = []

    def decisions(self, op: fx.Node) -> OpDecisions:
        """The settings for an op or graph input; an op of a formula is matched as the op that the formula computes."""
        formula = self.formulas.get(op)
        kind = formula.kind if formula is not None else None
        return self.rules.decisions(op, self.flow, feeds=self.feeds.names(op), kind=kind)

    def _is_split(self, match: PatternMatch) -> bool:
        return self.rules.config.split_gates and match.kind in GATED and is_image_gate(match.nodes[-1])

    def decide(self, node: fx.Node, decision: Decision, why: str) -> None:
        """Records in ``values`` or ``floats`` whether and how ``decision`` quantizes the value of ``node``."""
        if decision.enabled:
            spec = to_spec(decision.setting, None, node.meta["val"].ndim)
            self.values[node] = self.site_plan(spec, decision, why)
        else:
            self.floats[node] = f"float by {decision.reason}"

    def site_plan(self, spec: QuantSpec, decision: Decision, why: str, *, static: bool = False) -> SitePlan:
        """The plan of a site: ``spec`` and the other settings of ``decision``; parameters have no fixed range."""
        known = None if static else decision.setting.range
        return SitePlan(
            spec,
            decision.setting.scheme or self.scheme,
            static=static,
            range=None if known is None else (float(known[0]), float(known[1])),
            bounds=decision.setting.bounds,
            reason=f"{why}; {decision.reason}",
        )

    def counts(self, node: fx.Node) -> bool:
        """Whether the value is of counts, indices or masks; integer inputs are unless an op with weights reads them."""
        nature = self._natures[node]
        if nature is Nature.INTEGER and is_float(node):
            rows = [row for port in self.flow.readers(node) if (row := self.flow.row(port.user)) is not None]
            return not any(row.weights or row.multiplies for row in rows)
        return nature is Nature.COUNT

    def divides(self, port: Port) -> bool:
        """Whether a 0 in the value at ``port`` makes the reader's result infinite."""
        row = self.flow.row(port.user)
        return row is not None and port.arg in row.divisors

    def takes_data(self, port: Port) -> bool:
        """Whether the reader computes with the value at ``port``, or merges it."""
        row = self.flow.row(port.user)
        if row is None or row.role not in (Role.COMPUTE, Role.MERGE):
            return False
        return any(other.index == port.index for other in self.flow.data_ports(port.user))

    def unknown_readers(self, readers: list[Port]) -> str | None:
        """Why a value with these readers stays in float: ops without a row read it; ``None`` if none does."""
        names = {op_name(p.user) for p in readers if p.user.op != "output" and self.flow.row(p.user) is None}
        return f"read by {', '.join(sorted(names))}, not in the op table" if names else None

    def in_order(self) -> dict[Site, SitePlan]:
        """The quantized sites in graph order, parameters beside the op that reads them first."""
        ordered: dict[Site, SitePlan] = {}
        for node in self.graph.nodes:
            if node.op == "get_attr":
                continue
            for port in ports(node):
                if port.value.op == "get_attr" and port.value in self.values:
                    ordered.setdefault(value_site(port.value), self.values[port.value])
                if (site := edge_site(port)) in self.edges:
                    ordered[site] = self.edges[site]
            for draft in self.nested.get(node, ()):
                ordered |= draft.in_order()
            if node in self.values:
                ordered[value_site(node)] = self.values[node]
        return ordered

    def left_out(self) -> dict[Site, str]:
        """The values that stay in float, in graph order, each with the reason."""
        reasons: dict[Site, str] = {}
        for node in self.graph.nodes:
            for draft in self.nested.get(node, ()):
                reasons |= draft.left_out()
            if node in self.floats:
                reasons[value_site(node)] = self.floats[node]
        return reasons


def is_empty(node: fx.Node) -> bool:
    """Whether the value of ``node`` has no elements."""
    return any(isinstance(size, int) and size == 0 for size in node.meta["val"].shape)
