"""Tells which site calls a quantizer that several sites share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn

from qtk.core.site import Site
from qtk.graph.graphs import graphs
from qtk.graph.insert import quantizer_nodes
from qtk.graph.simulation import Simulation
from qtk.graph.sites import SITE, label
from qtk.quantizers.quantizer import Quantizer


class SiteCalls:
    """Follows the calls of quantizers: the sites of a graph call theirs once each, in order, whenever the graph runs.

    Of a quantizer that several graphs call (variants), the leader stands for all of its sites.

    Args:
        simulation: its graphs.
        quantizers: leader → quantizer.
    """

    def __init__(self, simulation: Simulation, quantizers: Mapping[Site, Quantizer]) -> None:
        self._leaders = {quantizer: site for site, quantizer in quantizers.items()}
        self._order: dict[nn.Module, dict[Quantizer, list[Site]]] = {}
        by_name = {site.name: site for site in simulation.plan}
        for graph in graphs(simulation.model).values():
            order: dict[Quantizer, list[Site]] = defaultdict(list)
            for node, quantizer in quantizer_nodes(graph).items():
                if quantizer in self._leaders:
                    order[quantizer].append(by_name[str(label(node, SITE))])
            self._order[graph] = order
        callers = [quantizer for order in self._order.values() for quantizer in order]
        self._of_one_graph = {quantizer for quantizer in callers if callers.count(quantizer) == 1}
        self._next: dict[Quantizer, Iterator[Site]] = {}

    @property
    def sites(self) -> list[Site]:
        """The sites that calls are told apart by, each once."""
        told = [
            site if quantizer in self._of_one_graph else self._leaders[quantizer]
            for order in self._order.values() for quantizer, sites in order.items() for site in sites
        ]
        return list(dict.fromkeys(told))

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Calls in the body are followed."""
        handles = [graph.register_forward_pre_hook(self._begin) for graph in self._order]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def site_of_next(self, quantizer: Quantizer) -> Site:
        """The site that calls ``quantizer`` now; to be asked once a call."""
        leader = self._leaders[quantizer]
        return next(self._next.get(quantizer, iter(())), leader) if quantizer in self._of_one_graph else leader

    def _begin(self, graph: nn.Module, _: object) -> None:
        for quantizer, sites in self._order[graph].items():
            self._next[quantizer] = iter(sites)
