"""Which values in front of all layers have channels in several units, that no common range holds.

A model that brings raw columns into one range, by constants, a batch norm, or their own mean and deviation, reads each
column apart, whatever ops stand between. Up to the first value whose range holds all of its channels they need digits.
So do values with a large offset that is taken off, of a temperature in kelvin or of a time.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

import torch
from torch import Tensor, fx

from qtk.calibration.width_check import LargeStep
from qtk.core.site import Site
from qtk.graph.flow import Flow, ancestors
from qtk.graph.graphs import roots
from qtk.graph.insert import quantizer_called
from qtk.graph.simulation import Simulation
from qtk.graph.sites import SITE, is_float, label
from qtk.operators.op_row import Precision

FEWEST_VALUES = 64
"""Values of each channel that its range is known by."""

SMALLEST_SHARE = 1 / 16
"""Of a range, that each channel must fill: a sixteenth has four bits less."""


class ChannelRanges:
    """The extremes of the channels of some sites. Args: ``axes``: which axes may count them, by site."""

    def __init__(self, axes: Mapping[Site, Iterable[int]]) -> None:
        self._axes = axes
        self._kept: dict[Site, dict[int, tuple[int, Tensor, Tensor]]] = {}

    @torch.no_grad()
    def keep(self, site: Site, x: Tensor) -> None:
        """Counts the channels of ``x``, a value of ``site``."""
        for axis in self._axes.get(site, ()):
            if axis >= x.ndim or not x.numel():
                continue
            rows = x.detach().movedim(axis, -1).flatten(0, -2)
            count, (low, high) = len(rows), rows.aminmax(dim=0)
            before = self._kept.setdefault(site, {}).get(axis)
            if before is not None and before[1].shape == low.shape:
                count, low, high = count + before[0], torch.minimum(low, before[1]), torch.maximum(high, before[2])
            self._kept[site][axis] = count, low, high

    def known(self, site: Site) -> dict[int, tuple[Tensor, Tensor]]:
        """Axis → least and largest value of each channel, of which enough values were seen."""
        kept = self._kept.get(site, {})
        return {axis: (low.float(), high.float())
                for axis, (count, low, high) in kept.items() if count >= FEWEST_VALUES}


def front_axes(simulation: Simulation, sites: Container[Site]) -> dict[Site, tuple[int, ...]]:
    """The sites that nothing but inputs of floats and constants reach, and the axes that may count their channels."""
    by_name = {site.name: site for site in simulation.plan if site in sites}
    found: dict[Site, tuple[int, ...]] = {}
    for graph in roots(simulation.model).values():
        flow, front = Flow(graph.graph), set[fx.Node]()
        for node in graph.graph.nodes:
            holds_floats = is_float(node) or isinstance(node.meta.get("val"), (list, tuple))  # not a size
            is_reached = node.op == "placeholder" or not front.isdisjoint(node.all_input_nodes)
            if not holds_floats or not is_reached or _is_layer(flow, node):
                continue
            front.add(node)
            site = by_name.get(str(label(node, SITE))) if quantizer_called(node) is not None else None
            if site is not None:
                ndim = node.meta["val"].ndim
                found[site] = {0: (), 1: (), 2: (1,), 3: (1, 2)}.get(ndim, (1,))
    return found


def uneven_channels(ranges: ChannelRanges, axes: Iterable[Site], simulation: Simulation) -> dict[Site, LargeStep]:
    """The sites in front of layers of whose range a channel fills less than ``SMALLEST_SHARE``, and why.

    Leaves out values that a layer reads as they are, as its weights may hold the units, and it needs one range; and
    values that share the encoding of others.
    """
    shares = {site.name: share for site in axes if (share := _share(ranges, site, simulation)) is not None}
    sites = {site.name: site for site in simulation.plan}
    found: dict[Site, LargeStep] = {}
    for graph in roots(simulation.model).values() if shares else ():
        flow = Flow(graph.graph)
        for node in graph.graph.nodes:
            name = str(label(node, SITE)) if quantizer_called(node) is not None else ""
            if name not in shares:
                continue
            walk = _Walk(flow, shares)
            if walk.follow(node):
                constants = tuple(sites[constant] for constant in dict.fromkeys(walk.constants))
                reason = f"a channel of it fills {shares[name]:.2g} of its range"
                found[sites[name]] = LargeStep(reason, SMALLEST_SHARE / shares[name], constants)
    others = {decided.leader or site for site, decided in simulation.plan.items() if site not in found}
    return {site: step for site, step in found.items() if (simulation.plan[site].leader or site) not in others}


def _share(ranges: ChannelRanges, site: Site, simulation: Simulation) -> float | None:
    """The least share of its range that a channel of several values fills, if it is too small."""
    quantizer = simulation.quantizers.get(site)
    encoding = None if quantizer is None or quantizer.frozen else quantizer.encoding
    if encoding is None or encoding.scale.numel() > 1 or encoding.spec.dtype.bits > 8:
        return None
    width = encoding.scale * int(encoding.spec.qmax - encoding.spec.qmin)
    shares = [float((high - low).where(high > low, torch.inf).min() / width)
              for low, high in ranges.known(site).values()]
    return min(shares) if shares and min(shares) < SMALLEST_SHARE else None


def _is_layer(flow: Flow, node: fx.Node) -> bool:
    row = flow.row(node)
    return row is not None and row.multiplies


class _Walk:
    """Follows channels in several units to what brings them together. Args: ``uneven``: sites that do not hold them.

    To exponentials and the like the absolute error counts, whatever the range of a channel.
    """

    def __init__(self, flow: Flow, uneven: Container[str]) -> None:
        self._flow, self._uneven, self._seen = flow, uneven, set[fx.Node]()
        self.constants: list[str] = []

    def follow(self, value: fx.Node) -> bool:
        """Returns false if a layer, or an op that is not known, reads the channels as they are."""
        if value in self._seen:
            return True
        self._seen.add(value)
        return all(self._reads(user) for user in value.users)

    def _reads(self, user: fx.Node) -> bool:
        if user.op == "output" or not (is_float(user) or isinstance(user.meta.get("val"), (list, tuple))):
            return True
        if quantizer_called(user) is not None:
            return str(label(user, SITE)) not in self._uneven or self.follow(user)
        row = self._flow.row(user)
        if row is None or row.multiplies or row.precision in (Precision.EXPONENT, Precision.FRACTION):
            return False
        constants = [read for read in user.all_input_nodes if self._flow.is_static(read)]
        self.constants += [str(label(node, SITE)) for node in (*constants, *ancestors(constants))
                           if quantizer_called(node) is not None]
        return self.follow(user)
