"""Rules of a config that set single sites of a model."""

from __future__ import annotations

import glob
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator

from torch import fx

from qtk.config.schema import Match, QuantConfig, Rule
from qtk.config.tensor_setting import Setting
from qtk.core.plan import leaders
from qtk.core.site import Site
from qtk.graph.dynamic_steps import dynamic_steps
from qtk.graph.graphs import graphs
from qtk.graph.insert import quantizer_nodes
from qtk.graph.simulation import Simulation
from qtk.graph.sites import edge_site, ports, value_site
from qtk.operators.lookup import row_of
from qtk.operators.op_row import Role
from qtk.planning.recurrent_profiles import float_step


class SiteRules:
    """The rules that set one site of a simulation each, and what must share its encoding.

    A weight is set by what it says of the ops that multiply with it, which may set other weights of theirs: the two
    matrices of a recurrent net. Other constants cannot be set alone. What a layer of a recurrent net quantizes at run
    time is one operator's, and in float with all of the layer alone: ``steps`` has the paths of such layers.

    Args:
        simulation: its plan has the sites.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._readers: dict[Site, dict[str, None]] = defaultdict(dict)
        for graph in graphs(simulation.model).values():
            quantizers = quantizer_nodes(graph)
            for node in graph.graph.nodes:
                for site in _weights(node, quantizers) if node not in quantizers else ():
                    self._readers[site][_path(value_site(node))] = None
        plan, steps = simulation.plan, dynamic_steps(simulation)
        self._step_of = {site: path for path, sites in steps.items() for site in sites}
        self.steps = list(steps)
        self.sites = [site for site in leaders(plan) if site not in self._step_of
                      and (site in self._readers or (site.port and not plan[site].static))]
        self._static = {site for site in self.sites if plan[site].static}

    def names(self) -> dict[str, str]:
        """Name of a site → the name by which it is left precise: its own, or the path of its layer."""
        return {site.name: site.name for site in self.sites} | {s.name: path for s, path in self._step_of.items()}

    def precise(self, config: QuantConfig, names: Collection[str], setting: Setting) -> QuantConfig:
        """As ``config``, of what has these ``names``."""
        config = self.config(config, [site for site in self.sites if site.name in names], setting)
        steps = (float_step(path) for path in self.steps if path in names)
        return config.model_copy(update={"rules": (*config.rules, *steps)})

    def is_weight(self, site: Site) -> bool:
        """Says whether rules set a site as a weight."""
        return site in self._static

    def groups(self) -> list[list[Site]]:
        """The sites in plan order; sites that no rule can set apart are together."""
        by_rule: dict[tuple[bool, tuple[str, ...]], list[Site]] = {}
        for site in self.sites:
            weight = site in self._static
            by_rule.setdefault((weight, tuple(self._readers[site]) if weight else (site.name,)), []).append(site)
        return list(by_rule.values())

    def config(self, config: QuantConfig, sites: Iterable[Site], setting: Setting) -> QuantConfig:
        """``config`` with a rule for each of ``sites``, behind its own rules, which may then be without effect."""
        config = config.with_rules_optional()
        return config.model_copy(update={"rules": (*config.rules, *(self._rule(site, setting) for site in sites))})

    def joined(self, config: QuantConfig, sites: Iterable[Site], setting: Setting) -> QuantConfig:
        """As ``config``, in three rules at most: one for all weights, one for all inputs, one for all outputs."""
        paths: dict[str, dict[str, None]] = {}
        for site in sites:
            rule = self._rule(site, setting)
            tensor = next(name for name in ("weight", "input", "output") if getattr(rule, name) is not None)
            paths.setdefault(tensor, {}).update(dict.fromkeys(rule.match.path))
        rules = (Rule.model_validate({"match": Match(path=tuple(of)), tensor: setting, "optional": True})
                 for tensor, of in paths.items())
        config = config.with_rules_optional()
        return config.model_copy(update={"rules": (*config.rules, *rules)})

    def _rule(self, site: Site, setting: Setting) -> Rule:
        if site in self._static:
            return Rule(match=Match(path=tuple(self._readers[site])), weight=setting, optional=True)
        match = Match(path=(_path(site),))
        if site.port.startswith("in["):
            return Rule(match=match, input=setting, optional=True)
        return Rule(match=match, output=setting, optional=True)


def _weights(node: fx.Node, quantizers: Collection[fx.Node]) -> Iterator[Site]:
    """The sites of the weights of an op, or of a module that runs as a whole."""
    if node.op == "call_module":
        read = {value.args[0] if value in quantizers else value for value in node.all_input_nodes}
        yield from (value_site(value) for value in read if isinstance(value, fx.Node) and value.op == "get_attr")
    elif node.op == "call_function" and (row := row_of(node)) is not None:
        for port in ports(node):
            if port.arg in row.weights:
                yield edge_site(port)
                yield from _passed(port.value, quantizers)


def _passed(value: fx.Node, quantizers: Collection[fx.Node]) -> Iterator[Site]:
    """The sites of a value, and of the values that it was moved from."""
    while True:
        yield value_site(value)
        row = row_of(value) if value.op == "call_function" else None
        if value not in quantizers and (row is None or row.role is not Role.MOVEMENT):
            return
        source = next(ports(value), None)
        if source is None:
            return
        value = source.value


def _path(site: Site) -> str:
    return glob.escape(site.name.partition(":")[0])
