"""Which quantized values hold others of so different ranges that the smaller ones have few codes of the common one.

Merges, and values of which ops read slices: an index beside features, columns in several units, boxes and scores that
one layer computes.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from qtk.calibration.site_samples import SiteSamples
from qtk.calibration.slices import is_slice
from qtk.calibration.width_check import LargeStep, UnheldInput
from qtk.core.site import Site
from qtk.graph.flow import Flow
from qtk.graph.graphs import roots
from qtk.graph.insert import quantizer_called
from qtk.graph.simulation import Simulation
from qtk.graph.sites import SITE, label, value_site
from qtk.operators.lookup import row_of
from qtk.operators.op_row import Role, Scaling

LARGEST_RATIO = 16.0
"""Of the ranges of two operands: the smaller one has then a sixteenth of the codes, four bits less."""

HANDS_ON = frozenset({Scaling.KEPT, Scaling.CLAMPED, Scaling.MOVED, Scaling.WINDOWED, Scaling.REDUCED, Scaling.ADDED,
                      Scaling.MULTIPLIED, Scaling.DIVIDED})
"""What the ops do with factors of channels whose results are as uneven as what they read."""


@dataclass(frozen=True, slots=True)
class UnevenValues:
    """The quantized values that no common range holds, and what reads slices of them.

    Args:
        outputs: names of the sites of merges, and of what is computed from these channel by channel.
        readers: module paths of products with weights that read slices, each of one range.
    """

    outputs: tuple[str, ...]
    readers: tuple[str, ...]


def uneven_values(samples: SiteSamples, simulation: Simulation) -> UnevenValues:
    """Finds merges whose operands differ by more than ``LARGEST_RATIO`` in range, and follows their values.

    Of a merge in float what is computed from it and has one range for all (``merged_members``); also values of which
    ops or outputs read such slices (``slices``). Leaves out values that are frozen, and values that a product with
    weights reads as a whole: it needs codes of one range.
    """
    sites = {site.name: site for site in simulation.plan}
    outputs: dict[str, None] = {}
    readers: dict[str, None] = {}
    for graph in roots(simulation.model).values():
        merges = [(node, quantized) for node in graph.graph.nodes if (quantized := _quantized_merge(node)) is not None]
        behind = [node for node in graph.graph.nodes if _joins_uneven(sites.get(str(label(node, SITE))), samples)]
        flow = Flow(graph.graph) if merges or behind else None
        uneven = [quantized for node, quantized in merges
                  if flow is not None and _is_uneven([sites[name] for name in _members(flow, node)], samples)]
        for quantized in (*uneven, *behind):
            assert flow is not None
            walk = _Walk(flow)
            if walk.follow(quantized) and not any(simulation.quantizers[sites[name]].frozen for name in walk.outputs):
                outputs |= dict.fromkeys(walk.outputs)
                readers |= dict.fromkeys(walk.readers)
    return UnevenValues(tuple(outputs), tuple(readers))


def uneven_inputs(samples: SiteSamples, simulation: Simulation) -> list[UnheldInput]:
    """Finds inputs of which ops read slices whose range is more than ``LARGEST_RATIO`` times smaller.

    Leaves out inputs that a product with weights reads as a whole.
    """
    sites = {site.name: site for site in simulation.plan}
    walks: dict[Site, list[_Walk | None]] = {}
    for graph in roots(simulation.model).values() if samples.members else ():
        flow = Flow(graph.graph)
        for node in graph.graph.nodes:
            site = sites.get(str(label(node, SITE))) if quantizer_called(node) is not None else None
            if site is not None and site.port == "input" and site in samples.members:
                walk = _Walk(flow)
                walks.setdefault(site, []).append(walk if walk.follow(node) else None)
    found = []
    for site, own in walks.items():
        ranges, decided = _ranges(site, samples), simulation.plan[site]
        known = [walk for walk in own if walk is not None]
        is_fixed = decided.range is not None or decided.leader is not None or simulation.quantizers[site].frozen
        if _differ(ranges) and not is_fixed and len(known) == len(own):
            ratio = max(ranges) / min(filter(None, ranges))
            between = dict.fromkeys(sites[name] for walk in known for name in walk.outputs if name != site.name)
            readers = dict.fromkeys(each for walk in known for each in walk.readers)
            step = LargeStep(f"its range is {ratio:.0f} times the range of a slice of it", ratio / LARGEST_RATIO)
            found.append(UnheldInput(site, tuple(between), tuple(readers), step))
    return found


def _is_uneven(members: list[Site], samples: SiteSamples) -> bool:
    return _differ([samples.largest(site) for site in members])


def _joins_uneven(site: Site | None, samples: SiteSamples) -> bool:
    """Says whether the operands of a float merge in an op's value, or slices of it, differ too much in range."""
    if site is None or site not in samples.members or not site.port.startswith("out"):
        return False
    return _differ(_ranges(site, samples))


def _ranges(site: Site, samples: SiteSamples) -> list[float]:
    of_members = [float(values.abs().nan_to_num(posinf=0.0).amax()) for values in samples.members[site].values()
                  if values.numel()]
    return [*of_members, samples.largest(site)]


def _differ(ranges: list[float]) -> bool:
    known = [largest for largest in ranges if largest]
    return bool(known) and max(known) > LARGEST_RATIO * min(known)


def _quantized_merge(node: fx.Node) -> fx.Node | None:
    """The call of the quantizer that quantizes the result of ``node``, if that merges values."""
    row = row_of(node)
    is_merge = row is not None and row.role is Role.MERGE
    return next((user for user in node.users if quantizer_called(user) is not None), None) if is_merge else None


def _members(flow: Flow, merge: fx.Node) -> list[str]:
    """The names of the sites of what is merged."""
    roots_of = [flow.root(port.value) for port in flow.data_ports(merge)]
    return [str(label(root, SITE)) for root in roots_of if quantizer_called(root) is not None]


class _Walk:
    """Follows uneven values to what reads them. Args: ``flow`` of a graph with quantizers."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self.outputs: list[str] = []
        self.readers: list[str] = []

    def follow(self, value: fx.Node) -> bool:
        """Collects the sites of ``value`` and the ops that pass its ranges; false if a product reads one as a whole."""
        if quantizer_called(value) is not None:
            self.outputs.append(str(label(value, SITE)))
        flow = self._flow
        return all(self._reads(port.user, is_slice(flow, value, port.value)) for port in flow.readers(value))

    def _reads(self, user: fx.Node, reads_slice: bool) -> bool:
        if quantizer_called(user) is not None:
            return reads_slice or self.follow(user)
        row = self._flow.row(user) if user.op != "output" else None
        if row is not None and row.multiplies:
            self.readers += [value_site(user).name.partition(":")[0]] if reads_slice else []
            return reads_slice
        return reads_slice or row is None or row.scales_as not in HANDS_ON or self.follow(user)
