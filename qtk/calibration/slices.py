"""Samples of the slices of quantized values that ops read, which have one range together.

An index beside features, columns in several units, boxes and scores that one layer computes.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping

import torch
from torch import Tensor, fx

from qtk.calibration.sampled_values import some_values
from qtk.calibration.uneven_channels import ChannelRanges
from qtk.core.site import Site
from qtk.graph.evaluate import evaluate
from qtk.graph.flow import Flow
from qtk.graph.graphs import roots
from qtk.graph.insert import quantizer_called
from qtk.graph.simulation import Simulation
from qtk.graph.sites import SITE, edge_site, is_float, label, value_site
from qtk.operators.contents import CONVOLUTIONS
from qtk.operators.lookup import row_of
from qtk.operators.op_row import Role

BY_PLACE = frozenset({"slice", "split"})
"""Ops that take elements by their places, whatever these hold."""

SLICES = BY_PLACE | {"getitem", "pick", "gather"}
"""Ops that take some of the values of a tensor, which may have a range of their own."""

MOST_SLICES = 8
"""Slices of one value; more are steps of a loop, of one range."""


class SliceSamples:
    """Values of each slice of a quantized value that an op or an output reads.

    The channels of a layer that is returned as it is are slices, which only the caller knows: of these the largest
    value of the channel with the smallest range.

    Args:
        simulation: its graphs.
        sites: the sites whose values may be sampled.
    """

    def __init__(self, simulation: Simulation, sites: Container[Site]) -> None:
        self._kept: dict[Site, dict[str, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
        self._slices: dict[Site, dict[str, tuple[fx.Node, fx.Node]]] = {}
        returned: dict[Site, tuple[int]] = {}
        by_name = {site.name: site for site in simulation.plan if site in sites}
        for graph in roots(simulation.model).values():
            flow = Flow(graph.graph)
            for node in graph.graph.nodes:
                site = by_name.get(str(label(node, SITE))) if quantizer_called(node) is not None else None
                if site is None or site in self._slices:
                    continue
                if found := dict(_slices(flow, node)):
                    self._slices[site] = {name: (node, part) for name, part in found.items()}
                if (axis := _returned_channels(flow, node)) is not None:
                    returned[site] = (axis,)
        self._channels = ChannelRanges(returned)
        self._returned = list(returned)

    @property
    def values(self) -> Mapping[Site, dict[str, Tensor]]:
        """Site of the quantizer → name of an edge into the op that reads a slice → some values of that."""
        found = {site: {name: torch.cat(values) for name, values in kept.items()} for site, kept in self._kept.items()}
        for site in self._returned:
            for axis, (low, high) in self._channels.known(site).items():
                largest = torch.maximum(-low, high)
                least = largest.where(largest > 0, torch.inf).min().nan_to_num(posinf=0.0)
                found.setdefault(site, {})[f"a channel at axis {axis}"] = least[None]
        return found

    @torch.no_grad()
    def keep(self, site: Site, x: Tensor) -> None:
        """Samples the slices of ``x``, a value of ``site``."""
        self._channels.keep(site, x)
        for name, (quantized, part) in self._slices.get(site, {}).items():
            if x.ndim != quantized.meta["val"].ndim:  # valid tokens alone
                return
            try:
                value = evaluate(part, {quantized: x, quantized.all_input_nodes[0]: x})
            except Exception:  # another graph's sizes, which the slice does not fit
                continue
            if value.numel():
                self._kept[site][name].append(some_values(value.detach()).float())


def _returned_channels(flow: Flow, quantized: fx.Node) -> int | None:
    """The axis of the channels of a layer, if its quantized value is returned as it is."""
    row = flow.row(quantized.all_input_nodes[0])
    if row is None or row.product is None or all(user.op != "output" for user in quantized.users):
        return None
    ndim = quantized.meta["val"].ndim
    return None if ndim < 2 else 1 if row.product in CONVOLUTIONS else ndim - 1


def _slices(flow: Flow, quantized: fx.Node) -> Iterator[tuple[str, fx.Node]]:
    """Yields the slices of a value that follow from it alone, with the names of edges; none if they are many."""
    found = {port.value: port for port in flow.readers(quantized)
             if is_float(port.value) and is_slice(flow, quantized, port.value, BY_PLACE)}
    if len(found) <= MOST_SLICES:
        for part, port in found.items():
            if _follows_from(part, quantized):
                yield (value_site(part) if port.user.op == "output" else edge_site(port)).name, part


def is_slice(flow: Flow, value: fx.Node, moved: fx.Node | None, kinds: Container[str] = SLICES) -> bool:
    """Says whether one of some ops lies between a value and what moves its elements."""
    while moved is not None and moved is not value:
        row = flow.row(moved)
        if row is not None and row.kind in kinds:
            return True
        moved = flow.carried(moved)
    return False


def _follows_from(part: fx.Node, quantized: fx.Node) -> bool:
    """Says whether a slice is computed from a value, its sizes and constants by ops that move elements."""
    seen, pending = {quantized, quantized.all_input_nodes[0]}, [part]
    while pending:
        node = pending.pop()
        if node not in seen:
            if not _is_simple(node):
                return False
            seen.add(node)
            pending += node.all_input_nodes
    return True


def _is_simple(node: fx.Node) -> bool:
    """Says whether a node is a size, a constant, or an op that moves elements; not an input."""
    row = row_of(node)
    is_size = not isinstance(node.meta.get("val"), (Tensor, list, tuple))
    is_moved = node.target is operator.getitem or (row is not None and row.role is Role.MOVEMENT)
    return node.op == "get_attr" or (node.op != "placeholder" and (is_size or is_moved))
