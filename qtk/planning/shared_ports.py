"""Rule 18 of the planner: one encoding for what a layer reads, and makes, in several graphs of a module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from qtk.core.granularity import PerTensor
from qtk.core.overlaps import joined
from qtk.core.plan import SitePlan
from qtk.core.site import Site
from qtk.graph.sites import edge_site, value_site
from qtk.planning.draft import Draft

Port: TypeAlias = tuple[str, int, int]
"""The path of a layer or of its weight, the number of its call in a graph, and the index of an argument, or -1."""


def share_ports(drafts: Sequence[Draft], sites: Mapping[Site, SitePlan]) -> dict[Site, SitePlan]:
    """Gives what a layer with weights, or attention, reads or makes in one graph, and in another, one encoding.

    The convolution of a streaming net reads the frames of a call in one graph, and in another the merge of frames that
    the call before has left with them; attention reads keys, or a cache with them. With one range of all of them, two
    calls compute what one call does. Formats with one scale are shared, and no dynamic ranges.
    """
    leaders: dict[Site, Site] = {}
    order = {site: place for place, site in enumerate(sites)}
    for group in joined([sites[site].leader or site for site in read] for read in _read_alike(drafts, sites)):
        first, *others = sorted(group, key=order.__getitem__)
        leaders |= dict.fromkeys(others, first)
    return {
        site: decided if (leader := leaders.get(decided.leader or site)) is None
        else replace(decided, leader=leader, reason=f"read, or made, where {leader} is in another graph")
        for site, decided in sites.items()
    }


def _read_alike(drafts: Sequence[Draft], sites: Mapping[Site, SitePlan]) -> Iterator[tuple[Site, Site]]:
    """Two sites that round what one layer reads, or makes, in two graphs, to one format."""
    first: dict[Port, Site] = {}
    for draft in drafts:
        for port, site in _ports(draft):
            if site not in sites or sites[site].static or sites[site].spec.dynamic:
                continue
            other = first.setdefault(port, site)
            spec = sites[site].spec
            if other != site and spec == sites[other].spec and isinstance(spec.granularity, PerTensor):
                yield other, site


def _ports(draft: Draft) -> Iterator[tuple[Port, Site]]:
    """Each argument of a layer that is data, and its result, and the site at which that is rounded, if at all."""
    calls = Counter[str]()
    for node in draft.graph.nodes:
        weights = [str(draft.flow.root(port.value).target) for port in draft.flow.weight_ports(node)]
        layer = str(node.target) if node.op == "call_module" else " ".join(weights)
        if layer:
            calls[layer] += 1
            for port in draft.flow.data_ports(node):
                edge = edge_site(port)
                site = edge if edge in draft.edges else value_site(draft.flow.root(port.value))
                yield (layer, calls[layer], port.index), site
            yield (layer, calls[layer], -1), value_site(node)
