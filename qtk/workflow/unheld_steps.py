"""Which layers of recurrent nets with dynamic quantization inside read values that one range of 8 bits does not hold."""

from __future__ import annotations

import glob

from torch import fx

from qtk.config.schema import Match, QuantConfig, Rule
from qtk.core.site import Site
from qtk.graph.graphs import nested_graphs, roots
from qtk.graph.insert import quantizer_nodes
from qtk.graph.op_table import RECURRENT, row_of
from qtk.graph.simulation import Simulation
from qtk.graph.sites import SITE, join, label, value_site
from qtk.workflow.width_check import SiteSamples


def unheld_steps(samples: SiteSamples, simulation: Simulation) -> list[Rule]:
    """For each such layer, in each direction, the rule that computes it in float."""
    sites = {site.name: site for site in simulation.plan}
    found: dict[str, None] = {}
    for graph in roots(simulation.model).values():
        for node in graph.graph.nodes:
            for path, dynamic in dynamic_steps(node, sites).items():
                bits = (simulation.plan[site].spec.dtype.bits for site in dynamic)
                if not all(map(samples.is_held_at_run_time, dynamic, bits)):
                    found[path] = None
    return [Rule(match=Match(path=(glob.escape(path),)), inside="float", optional=True) for path in found]


def dynamic_steps(node: fx.Node, sites: dict[str, Site]) -> dict[str, list[Site]]:
    """Path of a layer of the recurrent net that ``node`` calls → what is quantized dynamically in it."""
    if node.op != "call_module" or row_of(node) not in RECURRENT.values():
        return {}
    place = value_site(node).name.partition(":")[0]
    found: dict[str, list[Site]] = {}
    for path, graph in nested_graphs(node).items():
        names = [label(call, SITE) for call in quantizer_nodes(graph)]
        dynamic = [sites[name] for name in names if name is not None and name in sites]
        found.setdefault(join(place, path.rpartition(".")[0]), []).extend(dynamic)
    return found


def with_float_steps(config: QuantConfig, rules: list[Rule]) -> QuantConfig:
    """``config`` with rules for layers behind the last one that says ``dynamic`` of nets without a path.

    A rule with a path, and any later one, then says it after them.
    """
    said = [index for index, rule in enumerate(config.rules) if rule.inside == "dynamic" and not rule.match.path]
    place = said[-1] + 1 if said else 0
    return config.model_copy(update={"rules": (*config.rules[:place], *rules, *config.rules[place:])})
