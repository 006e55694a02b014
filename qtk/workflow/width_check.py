"""Names the activations that their width does not hold, at the end of a calibration, each with the rule to write.

A sample of the values of every site is kept while the data run, of each member of a merged group on its own, and
quantized with the encodings that the calibration found.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from qtk.config.load import load_config
from qtk.config.schema import QuantConfig
from qtk.config.shipped import shipped_names
from qtk.core.encoding import Encoding, encodings_to
from qtk.core.granularity import PerTensor
from qtk.core.plan import SitePlan
from qtk.core.site import Site
from qtk.core.transfer import HOST, moved
from qtk.graph.simulation import Simulation
from qtk.graph.site_calls import SiteCalls
from qtk.numerics.affine import fake_quantize
from qtk.numerics.error import decibels
from qtk.quantizers.quantizer import Quantizer
from qtk.report.table import Column, Table

SAMPLE = 256
"""Values of a site that are kept of a call."""

CALLS = 8
"""First calls of a site of which values are kept; later ones if their number is a power of two."""

FEWEST_CODES = 8
"""Codes that the values of a site must reach, of a width that has at least eight times as many."""

BELOW_FULL_DB, HIGHEST_DB = 30.0, 20.0
"""A site is named below 6 dB a bit less the first, and never above the second."""

ZEROED, ZEROED_DB = 0.75, 30.0
"""The share of values that become 0 without being it from which a site is named, unless its SQNR is higher."""

SHOWN = 12


@dataclass(frozen=True, slots=True)
class UnheldSite:
    """An activation that its width does not hold.

    Args:
        name: name of the site.
        sqnr_db: of its values, quantized with its encoding.
        zeroed: share of the values other than 0 that become 0.
        codes: how many codes its values reach.
        reason: what is wrong, in words.
        rule: the rule to write.
    """

    name: str
    sqnr_db: float
    zeroed: float
    codes: int
    reason: str
    rule: str


class SiteSamples:
    """Keeps some values of every site that calls a quantizer, while ``listening``.

    Args:
        simulation: its graphs.
        quantizers: leader → quantizer, of which values are kept.
    """

    def __init__(self, simulation: Simulation, quantizers: Mapping[Site, Quantizer]) -> None:
        self._quantizers = quantizers
        self._calls = SiteCalls(simulation, quantizers)
        self._values: dict[Site, list[Tensor]] = defaultdict(list)
        self._seen: dict[Site, int] = defaultdict(int)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Keeps values of calls in the body."""
        handles = [quantizer.register_forward_pre_hook(self._keep) for quantizer in self._quantizers.values()]
        try:
            with self._calls.followed():
                yield
        finally:
            for handle in handles:
                handle.remove()

    def unheld(self, simulation: Simulation, encodings: Mapping[Site, Encoding]) -> list[UnheldSite]:
        """The sites that ``encodings``, each of a leader, do not hold, worst first."""
        found, target = [], simulation.target
        precise = load_config(target).precise if target in shipped_names("targets") else QuantConfig(version=1).precise
        leaders = {site: simulation.plan[site].leader or site for site in self._values if site in simulation.plan}
        sites = [
            site for site, leader in leaders.items()  # others carry a mask, or have no range of their own
            if leader in encodings and isinstance(encodings[leader].spec.granularity, PerTensor)
        ]
        ranges = encodings_to([encodings[leaders[site]] for site in sites], HOST)
        values = moved([torch.cat(self._values[site]).float() for site in sites], HOST)
        for site, encoding, kept in zip(sites, ranges, values, strict=True):
            one = _judged(site, simulation.plan[site], kept[kept.isfinite()], encoding, precise)
            found += [] if one is None else [one]
        return sorted(found, key=lambda each: (each.codes >= FEWEST_CODES, each.sqnr_db))

    def _keep(self, quantizer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(quantizer, Quantizer)
        site = self._calls.site_of_next(quantizer)
        self._seen[site] += 1
        seen = self._seen[site]
        if inputs[0].numel() and (seen <= CALLS or seen & (seen - 1) == 0):
            self._values[site].append(_some(inputs[0].detach()))


def _some(x: Tensor) -> Tensor:
    """About ``SAMPLE`` values, evenly spread in memory; a step that is odd meets all channels."""
    in_memory = x.permute(sorted(range(x.ndim), key=x.stride, reverse=True))  # nothing is copied but the sample
    return in_memory.reshape(-1)[:: max(x.numel() // SAMPLE, 1) | 1].clone()


def _judged(
    site: Site, plan: SitePlan, values: Tensor, encoding: Encoding, precise: Literal[16, "float"]
) -> UnheldSite | None:
    spec = encoding.spec
    bits = spec.dtype.bits
    if not values.numel() or not values.any():
        return _constant(site, 0.0) if values.numel() > 1 and site.port == "input" else None
    low, high = values.aminmax()
    if low == high:
        return _constant(site, float(low)) if site.port == "input" and values.numel() > 1 else None
    rounded = fake_quantize(values, encoding.scale, encoding.zero_point, (), int(spec.qmin), int(spec.qmax))
    noise = float((rounded - values).double().square().sum())
    sqnr_db = decibels(float(values.double().square().sum()), noise)
    zeroed = float(((rounded == 0) & (values != 0)).sum()) / max(int((values != 0).sum()), 1)
    codes = int(rounded.unique().numel())  # type: ignore[no-untyped-call]
    shared = f", as it shares a range with {plan.leader.name}" if plan.leader is not None else ""
    width = int(spec.qmax - spec.qmin) + 1
    if codes < FEWEST_CODES and width >= 8 * FEWEST_CODES and sqnr_db < ZEROED_DB:
        reason = f"reaches {codes} of {width} codes{shared}"
    elif sqnr_db < min(6.02 * bits - BELOW_FULL_DB, HIGHEST_DB):
        reason = f"{bits} bits leave {sqnr_db:.1f} dB{shared}"
    elif zeroed > ZEROED and sqnr_db < ZEROED_DB:
        reason = f"{zeroed:.0%} of its values become 0{shared}"
    else:
        return None
    return UnheldSite(
        site.name, sqnr_db, zeroed, codes, reason, _rule(plan.leader or site, "float" if shared else precise)
    )


def _constant(site: Site, value: float) -> UnheldSite:
    return UnheldSite(
        site.name, float("-inf"), 0.0, 1, f"was {value:g} in all data, and is quantized as if it always were",
        "calibrate with the values that it takes in use; of a state, along a sequence",
    )


def _rule(site: Site, output: Literal[16, "float"]) -> str:
    path = site.name.partition(":")[0]
    return f"{{match: {{path: {path!r}}}, output: {output if output == 'float' else f'{{bits: {output}}}'}}}"


def warn_of_unheld(samples: SiteSamples, simulation: Simulation, encodings: Mapping[Site, Encoding]) -> None:
    """Warns of the sites that their width does not hold, in one table; arguments as ``SiteSamples.unheld``."""
    found = samples.unheld(simulation, encodings)
    if not found:
        return
    rows = tuple(
        (each.name, f"{each.sqnr_db:.1f}", f"{each.zeroed:.0%}", str(each.codes), each.reason, each.rule)
        for each in found[:SHOWN]
    )
    columns = (Column("site"), Column("own SQNR, dB", number=True), Column("become 0", number=True),
               Column("codes", number=True), Column("what is wrong"), Column("rule"))
    more = f"; {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    table = Table(f"{len(found)} activations are not held by their width{more}:", columns, rows)
    warnings.warn(str(table), stacklevel=4)
