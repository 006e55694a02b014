"""The bounds beyond which nothing reads a value, for clamps alone read it: its range need not hold the rest."""

from __future__ import annotations

from torch import fx

from qtk.core.site import Site
from qtk.graph.flow import Flow
from qtk.graph.graphs import graphs
from qtk.graph.insert import quantizer_nodes
from qtk.graph.simulation import Simulation
from qtk.graph.sites import SITE, label
from qtk.operators.targets import clamp_bounds

Bounds = tuple[float | None, float | None]

CLAMPS = frozenset({"clamp", "hardtanh", "relu", "relu6"})
"""Kinds of ops that read nothing of a value beyond their bounds."""


def clamped_values(simulation: Simulation) -> dict[Site, Bounds]:
    """The computed values that clamps alone read, each with a quantizer of its own."""
    shared = {decided.leader for decided in simulation.plan.values()}
    sites = {site.name: site for site, decided in simulation.plan.items()
             if decided.leader is None and site not in shared and decided.range is None and decided.bounds is None}
    found: dict[Site, list[Bounds | None]] = {}
    for graph in graphs(simulation.model).values():
        flow = Flow(graph.graph)
        for node in quantizer_nodes(graph):
            site = sites.get(str(label(node, SITE)))
            if site is not None and node.all_input_nodes[0].op == "call_function":
                found.setdefault(site, []).append(_bounds(flow, node))
    joined = {site: _joined(each) for site, each in found.items()}
    return {site: bounds for site, bounds in joined.items() if bounds is not None}


def _bounds(flow: Flow, value: fx.Node) -> Bounds | None:
    """The bounds of what reads a value together; ``None`` if something reads all of it."""
    found: list[Bounds | None] = []
    for port in flow.readers(value):
        row = flow.row(port.user) if port.user.op == "call_function" and port.arg == 0 else None
        found.append(clamp_bounds(port.user) if row is not None and row.kind in CLAMPS else None)
    return _joined(found)


def _joined(each: list[Bounds | None]) -> Bounds | None:
    known = [bounds for bounds in each if bounds is not None]
    if not known or len(known) < len(each):
        return None
    lowers, uppers = zip(*known, strict=True)
    joined = None if None in lowers else min(lowers), None if None in uppers else max(uppers)
    return None if joined == (None, None) else joined
