"""Layers of recurrent nets whose two products alone read quantized values, in ranges of their own at run time."""

from __future__ import annotations

from collections import defaultdict

from torch import fx

from qtk.core.site import Site
from qtk.graph.captured_graph import CapturedGraph
from qtk.graph.graphs import nested_graphs, roots
from qtk.graph.insert import quantizer_nodes
from qtk.graph.simulation import Simulation
from qtk.graph.sites import SITE, join, label, value_site
from qtk.operators.lookup import row_of
from qtk.operators.op_table import RECURRENT


def dynamic_steps(simulation: Simulation) -> dict[str, list[Site]]:
    """Path of such a layer, in one direction (``lstm.l0``, of a cell ``cell.step``) → its two sites."""
    sites = {site.name: site for site in simulation.plan}
    found: dict[str, list[Site]] = {}
    for graph in roots(simulation.model).values():
        for node in graph.graph.nodes:
            for path, parts in _steps(node).items():
                names = [[label(call, SITE) for call in quantizer_nodes(part)] for part in parts]
                called = [sites[str(name)] for each in names for name in each]
                if all(len(each) == 1 for each in names) and all(simulation.plan[site].spec.dynamic for site in called):
                    found[path] = called
    return found


def _steps(node: fx.Node) -> dict[str, list[CapturedGraph]]:
    """Path of a layer of the recurrent net that ``node`` calls → its graphs; empty if it calls none."""
    steps: dict[str, list[CapturedGraph]] = defaultdict(list)
    if node.op == "call_module" and row_of(node) in RECURRENT.values():
        place = value_site(node).name.partition(":")[0]
        for path, graph in nested_graphs(node).items():
            steps[join(place, path.rpartition(".")[0])].append(graph)
    return steps
