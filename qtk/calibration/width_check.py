"""Judges whether its width holds the values of an activation, and names what is not held, with the rule to write."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from qtk.calls.states import proposed_states
from qtk.core.encoding import Encoding
from qtk.core.site import Site
from qtk.graph.simulation import Simulation
from qtk.numerics.affine import fake_quantize
from qtk.numerics.error import decibels
from qtk.report.table import Column, Table

FEWEST_CODES = 8
"""Codes that the values of a site must reach, of a width that has at least eight times as many."""

BELOW_FULL_DB, HIGHEST_DB = 30.0, 20.0
"""A site is named below 6 dB a bit less the first, and never above the second."""

ZEROED = 0.75
"""The share of values that become 0 without being it from which a site is named."""

FINE_DB = 35.0
"""The SQNR above which nothing is said of a site. Power spectra in 8 bits, four of five values 0, have 31."""

SHOWN = 12


@dataclass(frozen=True, slots=True)
class LargeStep:
    """A step that is large for what is computed of a site, whatever the SQNR of its own values.

    Args:
        reason: that in words.
        times: how many times the largest step that is not.
        constants: the sites of the constants of these ops, which have the same fault.
    """

    reason: str
    times: float
    constants: tuple[Site, ...] = ()

    def precise(self, bits: int, precise: Literal[16, "float"]) -> Literal[16, "float"]:
        """Returns what holds the site: what the target has for such sites, or float where its step is large too."""
        return precise if precise == "float" or self.times <= 2 ** (precise - bits) else "float"


@dataclass(frozen=True, slots=True)
class UnheldInput:
    """A model input whose range does not hold what is read of it.

    Args:
        site: of the input.
        between: the sites behind it that have the same range.
        readers: module paths of products that read what it does not hold without a range of its own.
        step: what it leaves of that.
    """

    site: Site
    between: tuple[Site, ...]
    readers: tuple[str, ...]
    step: LargeStep


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


def judged(
    site: Site, simulation: Simulation, values: Tensor, encoding: Encoding, precise: Literal[16, "float"],
    large: LargeStep | None, bounds: tuple[float | None, float | None] | None = None,
) -> UnheldSite | None:
    """Judges one site by some of its values, its encoding, and whether its step is ``large`` for what reads it.

    ``bounds``: beyond which nothing reads it.
    """
    spec, plan = encoding.spec, simulation.plan[site]
    bits = spec.dtype.bits
    if not values.numel() or not values.any():
        return _constant(site, 0.0, simulation) if values.numel() > 1 and site.port == "input" else None
    if plan.range is not None:
        values = values.clamp(*plan.range)  # what a fixed range clips is decided
    if bounds is not None:
        values = values.clamp(*bounds)
    low, high = values.aminmax()
    if low == high:
        return _constant(site, float(low), simulation) if site.port == "input" and values.numel() > 1 else None
    rounded = fake_quantize(values, encoding.scale, encoding.zero_point, (), int(spec.qmin), int(spec.qmax))
    loss = Loss.of(values, rounded)
    codes = int(rounded.unique().numel())  # type: ignore[no-untyped-call]
    shared = f", as it shares a range with {plan.leader.name}" if plan.leader is not None else ""
    width = int(spec.qmax - spec.qmin) + 1
    if codes < FEWEST_CODES and width >= 8 * FEWEST_CODES and loss.sqnr_db < FINE_DB:
        reason = f"reaches {codes} of {width} codes{shared}"
    elif (found := loss.reason(bits)) is not None:
        reason = f"{found}{shared}"
    elif large is not None:
        reason = large.reason
    else:
        return None
    precise = precise if large is None else large.precise(bits, precise)
    return UnheldSite(
        site.name, loss.sqnr_db, loss.zeroed, codes, reason, _rule(plan.leader or site, "float" if shared else precise)
    )


@dataclass(frozen=True, slots=True)
class Loss:
    """What values lose that are rounded.

    Args:
        sqnr_db: their SQNR.
        zeroed: share of the values other than 0 that become 0.
    """

    sqnr_db: float
    zeroed: float

    @classmethod
    def of(cls, values: Tensor, rounded: Tensor) -> Loss:
        noise = float((rounded - values).double().square().sum())
        zeroed = float(((rounded == 0) & (values != 0)).sum()) / max(int((values != 0).sum()), 1)
        return cls(decibels(float(values.double().square().sum()), noise), zeroed)

    def reason(self, bits: int) -> str | None:
        """Returns what is wrong with so many bits; ``None`` if they hold the values."""
        if self.sqnr_db < min(6.02 * bits - BELOW_FULL_DB, HIGHEST_DB):
            return f"{bits} bits leave {self.sqnr_db:.1f} dB"
        if self.zeroed > ZEROED and self.sqnr_db < FINE_DB:
            return f"{self.zeroed:.0%} of its values become 0"
        return None


def _constant(site: Site, value: float, simulation: Simulation) -> UnheldSite:
    states = proposed_states(simulation.model).get(site)
    along = f"QuantSim(…, states={dict(states)})" if states and value == 0 else "along a sequence"  # states begin at 0
    return UnheldSite(
        site.name, float("-inf"), 0.0, 1, f"was {value:g} in all data, and is quantized as if it always were",
        f"calibrate with the values that it takes in use; of a state, {along}",
    )


def _rule(site: Site, output: Literal[16, "float"]) -> str:
    path = site.name.partition(":")[0]
    return f"{{match: {{path: {path!r}}}, output: {output if output == 'float' else f'{{bits: {output}}}'}}}"


def warn_of_unheld(found: Sequence[UnheldSite]) -> None:
    """Warns of the sites that their width does not hold, in one table."""
    rows = tuple(
        (each.name, f"{each.sqnr_db:.1f}", f"{each.zeroed:.0%}", str(each.codes), each.reason, each.rule)
        for each in found[:SHOWN]
    )
    columns = (Column("site"), Column("own SQNR, dB", number=True), Column("become 0", number=True),
               Column("codes", number=True), Column("what is wrong"), Column("rule"))
    more = f"; {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    table = Table(f"{len(found)} activations are not held by their width{more}:", columns, rows)
    warnings.warn(str(table), stacklevel=4)
