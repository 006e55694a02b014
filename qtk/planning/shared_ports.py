"""Rule 18 of the planner: one encoding for what a layer reads, and makes, in several graphs of a module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from torch import fx

from qtk.core.granularity import PerTensor
from qtk.core.overlaps import joined
from qtk.core.plan import SitePlan
from qtk.core.site import Site
from qtk.graph.flow import maker
from qtk.graph.sites import edge_site, value_site
from qtk.nn.scan import Scan
from qtk.operators.targets import called_module
from qtk.planning.draft import Draft
from qtk.planning.plan_caches import holds_a_cache

Place: TypeAlias = tuple[str, int, int, int]
"""A layer, how often a graph calls it, the number of the call, and the index of an argument, or -1."""


@dataclass(frozen=True, slots=True)
class _Read:
    """What a layer reads or makes at a place in one graph.

    Args:
        site: where it is rounded, if at all.
        goes_on: whether it goes on from an earlier call, or is a result: a merge with a cache, a scan, what is made.
    """

    site: Site
    goes_on: bool


def share_ports(drafts: Sequence[Draft], sites: Mapping[Site, SitePlan]) -> dict[Site, SitePlan]:
    """Gives what a layer with weights, or attention, reads or makes in one graph, and in another, one encoding.

    The convolution of a streaming net reads the frames of a call in one graph, and in another the merge of frames that
    the call before has left with them; attention reads keys, or a cache with them. With one range of all of them, two
    calls compute what one call does. Formats with one scale and one rule for the range are shared, and no dynamic
    ranges; nor what two inputs are, as an image and a text that one projection takes.
    """
    leaders: dict[Site, Site] = {}
    order = {site: place for place, site in enumerate(sites)}
    for group in joined([sites[site].leader or site for site in read] for read in _read_in_two(drafts, sites)):
        first, *others = sorted(group, key=order.__getitem__)
        leaders |= dict.fromkeys(others, first)
    return {
        site: decided if (leader := leaders.get(decided.leader or site)) is None
        else replace(decided, leader=leader, reason=f"read, or made, where {leader} is in another graph")
        for site, decided in sites.items()
    }


def _read_in_two(drafts: Sequence[Draft], sites: Mapping[Site, SitePlan]) -> Iterator[tuple[Site, Site]]:
    """Two sites that round what one layer reads, or makes, in two graphs, to one format."""
    first: dict[Place, _Read] = {}
    for draft in drafts:
        for place, read in _places(draft):
            if read.site not in sites or sites[read.site].static or sites[read.site].spec.dynamic:
                continue
            other = first.setdefault(place, read)
            if other.site != read.site and (other.goes_on or read.goes_on) and _is_one_format(
                    sites[other.site], sites[read.site]):
                yield other.site, read.site


def _is_one_format(a: SitePlan, b: SitePlan) -> bool:
    return isinstance(a.spec.granularity, PerTensor) and (a.spec, a.range, a.min_fill, a.bounds, a.scheme) == (
        b.spec, b.range, b.min_fill, b.bounds, b.scheme)


def _places(draft: Draft) -> Iterator[tuple[Place, _Read]]:
    """Each argument of a layer that is data, and its result."""
    layers = {node: layer for node in draft.graph.nodes if (layer := _layer(draft, node))}
    counts, calls = Counter(layers.values()), Counter[str]()
    for node, layer in layers.items():
        calls[layer] += 1
        place = layer, counts[layer], calls[layer]
        for port in draft.flow.data_ports(node):
            edge, root = edge_site(port), draft.flow.root(port.value)
            goes_on = holds_a_cache(draft.flow, root) or isinstance(called_module(maker(root)), Scan)
            yield (*place, port.index), _Read(edge if edge in draft.edges else value_site(root), goes_on)
        yield (*place, -1), _Read(value_site(node), True)


def _layer(draft: Draft, node: fx.Node) -> str | None:
    """Names a layer as all graphs do: by the path of a module, or an op and its weights; ``None`` of other nodes."""
    if node.op == "call_module":
        return str(node.target)
    weights = [str(draft.flow.root(port.value).target) for port in draft.flow.weight_ports(node)]
    return " ".join([str(node.target), *weights]) if weights else None
