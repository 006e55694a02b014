"""Finds model inputs with markers, numbers that stand for a missing value such as −9999, which the model replaces.

A marker is one number, smallest or largest of all and repeated, that takes the range from the others: with −9999 in it
steps of 8 bits are 39. A model that replaces it (``where``, ``masked_fill``, a clamp) computes from the others alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor, fx

from qtk.calibration.width_check import LargeStep, Loss, UnheldInput
from qtk.core.dtypes import integer
from qtk.core.encoding import Encoding
from qtk.core.site import Site
from qtk.graph.graphs import graphs
from qtk.graph.insert import quantizer_called
from qtk.graph.simulation import Simulation
from qtk.graph.sites import SITE, is_float, label, value_site
from qtk.numerics.affine import fake_quantize
from qtk.numerics.ranges import choose_range
from qtk.operators.lookup import row_of
from qtk.operators.op_row import Mask, Role

MOST_MARKERS = 4
"""Different markers that are looked for in one input."""

PRECISE_BITS = 16
"""What a site gets on targets without float, if it holds the other values."""

REPLACING = frozenset({"index_put"})
"""Kinds of ops that put another number where a condition holds; ops that make masks do too."""


def marked_inputs(samples: Mapping[Site, tuple[Tensor, Encoding]], simulation: Simulation) -> list[UnheldInput]:
    """The inputs whose range is taken by markers. Args: ``samples``: some finite values of sites, their encodings."""
    steps = {site: step for site, (values, encoding) in samples.items()
             if site.port == "input" and simulation.plan[site].range is None
             and not simulation.quantizers[site].frozen and (step := _marked(values, encoding)) is not None}
    coarse = {site.name: site for site, known in samples.items() if _is_coarse(*known)} if steps else {}
    walks: dict[Site, list[_Walk | None]] = {site: [] for site in steps}
    for graph in graphs(simulation.model).values() if steps else ():
        for node in graph.graph.nodes:
            site = coarse.get(str(label(node, SITE))) if quantizer_called(node) is not None else None
            if site in walks:
                walk = _Walk(coarse)
                walks[site].append(walk if walk.follow(node) and walk.gains else None)
    found = []
    for site, own in walks.items():
        known = [walk for walk in own if walk is not None]
        if own and len(known) == len(own):
            between = dict.fromkeys(each for walk in known for each in walk.between)
            readers = dict.fromkeys(each for walk in known for each in walk.readers)
            found.append(UnheldInput(site, tuple(between), tuple(readers), steps[site]))
    return found


def _marked(values: Tensor, encoding: Encoding) -> LargeStep | None:
    bits, others, markers = encoding.spec.dtype.bits, values, list[float]()
    while len(markers) < MOST_MARKERS and others.any():
        marker = max(others.aminmax(), key=lambda end: float((end - others.median()).abs()))
        is_marker = others == marker
        if int(is_marker.sum()) < 2:
            return None
        others = others[~is_marker]
        markers.append(float(marker))
        reason = _loss(others, encoding) if others.any() else None
        if reason is not None and _loss(others, _own_range(others, bits, encoding)) is None:
            share = 1 - others.numel() / values.numel()
            shown = " and ".join(f"{each:g}" for each in markers)
            wider = _loss(others, _own_range(values, PRECISE_BITS, encoding))
            times = 1.0 if wider is None else 2.0**PRECISE_BITS
            return LargeStep(f"{shown}, {share:.0%} of its values, takes the range: of the others {reason}", times)
    return None


def _is_coarse(values: Tensor, encoding: Encoding) -> bool:
    """Says whether an encoding does not hold the half of the values other than 0 that is nearest to their median."""
    values = values[values != 0]
    if not values.numel():
        return False
    far = (values - values.median()).abs()
    return _loss(values[far <= far.median()], encoding) is not None


def _own_range(values: Tensor, bits: int, encoding: Encoding) -> Encoding:
    """The encoding of the range of ``values`` in so many bits."""
    code = integer(bits, signed=encoding.spec.qmin < 0)
    spec = replace(encoding.spec, dtype=code, narrow_range=False, reduced_range=False)
    low, high = values.aminmax()
    return Encoding(spec, *choose_range(low[None], high[None], spec))


def _loss(values: Tensor, encoding: Encoding) -> str | None:
    """Says what an encoding leaves of some values; ``None`` if it holds them."""
    spec = encoding.spec
    rounded = fake_quantize(values, encoding.scale, encoding.zero_point, (), int(spec.qmin), int(spec.qmax))
    return Loss.of(values, rounded).reason(spec.dtype.bits)


class _Walk:
    """Follows markers to what replaces them. Args: ``coarse``: the sites that do not hold most of their values."""

    def __init__(self, coarse: Mapping[str, Site]) -> None:
        self._coarse, self._seen = coarse, set[tuple[fx.Node, bool]]()
        self.between: list[Site] = []
        self.readers: list[str] = []
        self.gains = False

    def follow(self, value: fx.Node, *, is_replaced: bool = False) -> bool:
        """Returns false if a product, or an op that is not known, reads the markers."""
        if (value, is_replaced) in self._seen:
            return True
        self._seen.add((value, is_replaced))
        return all(self._reads(user, is_replaced) for user in value.users)

    def _reads(self, user: fx.Node, is_replaced: bool) -> bool:
        if user.op == "output" or not (is_float(user) or isinstance(user.meta.get("val"), (list, tuple))):
            return True
        if quantizer_called(user) is not None:
            site = self._coarse.get(str(label(user, SITE)))
            if site is None:
                self.gains = True
                return True
            self.between.append(site)
            return self.follow(user)
        row = row_of(user)
        if row is None:
            return False
        if row.multiplies:
            self.readers.append(value_site(user).name.partition(":")[0])
            self.gains = True
            return is_replaced
        replaces = row.role in (Role.MOVEMENT, Role.MERGE) and (Mask.MAKES in row.mask or row.kind in REPLACING)
        return self.follow(user, is_replaced=is_replaced or replaces)
