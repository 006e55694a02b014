"""The errors of every site of a simulation, as a list that prints as a table."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from qtk.report.table import Column, Table


@dataclass(frozen=True, slots=True)
class SiteError:
    """Error at one site over all data.

    Args:
        site: name of the site.
        sqnr_db: accumulated error: 10·log10(Σ float² / Σ (simulated - float)²), in dB.
        max_error_scales: largest absolute accumulated error, each in units of the scale of its own channel or block;
            NaN where each tensor has its own.
        unpaired: simulated calls without a float call of the same shape, because the model took another path (a router
            that sends tokens elsewhere); they are not counted, and if there are no others ``sqnr_db`` is NaN.
        own_sqnr_db: own error: the same with the float value quantized by this site alone in place of the simulated.
        clipped: share of the float values outside of the range of the codes, 0…1.
        range_filled: extent of the float values as a multiple of the extent of the codes: above 1 they are clipped,
            0.25 leaves two bits without use; NaN where each tensor has its own range.
        not_finite: the number of simulated values that are NaN or infinite where the float values are numbers; with
            any, ``sqnr_db`` is NaN.
    """

    site: str
    sqnr_db: float
    max_error_scales: float
    unpaired: int = 0
    own_sqnr_db: float = math.nan
    clipped: float = 0.0
    range_filled: float = math.nan
    not_finite: int = 0


class SiteErrors(list[SiteError]):
    """A list of errors, worst own error first; prints as a table.

    In front, in order of execution, are the sites where the simulation is NaN or infinite and float is not: the first
    of these, or what it is computed from, is the cause of the others.

    >>> print(SiteErrors([SiteError("fc:out", 20.5, 3.0, 0, 31.25, 0.0125, 1.5)]))
    error of 1 sites, worst own error first
     site   │ own SQNR │ accumulated │ clipped │ range filled
    ────────┼──────────┼─────────────┼─────────┼──────────────
     fc:out │  31.2 dB │     20.5 dB │  1.25 % │         1.50
    >>> print(SiteErrors([SiteError("log:out", math.nan, 1.0, own_sqnr_db=30.0, not_finite=2)]))
    error of 1 sites, worst own error first; NaN or infinite values begin at log:out: leave what log:out reads in float
     site    │ own SQNR │ accumulated │ clipped │ range filled │   not finite
    ─────────┼──────────┼─────────────┼─────────┼──────────────┼──────────────
     log:out │  30.0 dB │      nan dB │  0.00 % │              │ 2, the first
    """

    def top(self, count: int = 10) -> SiteErrors:
        """The first ``count``."""
        return SiteErrors(self[:count])

    def table(self) -> Table:
        """The table that is printed."""
        broken = [error for error in self if error.not_finite]
        headings = ("own SQNR", "accumulated", "clipped", "range filled", *(["not finite"] if broken else []))
        columns = (Column("site"), *(Column(heading, number=True) for heading in headings))
        rows = tuple(
            (error.site, f"{error.own_sqnr_db:.1f} dB", f"{error.sqnr_db:.1f} dB", f"{error.clipped:.2%}".replace(
                "%", " %"), "" if math.isnan(error.range_filled) else f"{error.range_filled:.2f}",
                *([_not_finite(error, broken[0])] if broken else []))
            for error in self
        )
        return Table(f"error of {len(self)} sites, {self.order}", columns, rows)

    @property
    def order(self) -> str:
        """Says in which order the sites are, and where NaN or infinite values begin."""
        first = next((error.site for error in self if error.not_finite), None)
        return "worst own error first" if first is None else (
            f"worst own error first; NaN or infinite values begin at {first}: leave what {first} reads in float")

    def __str__(self) -> str:
        return self.table().text()

    def __repr__(self) -> str:
        shown = ", ".join(f"{error.site} {error.own_sqnr_db:.1f} dB" for error in self[:3])
        return f"SiteErrors({shown}{', …' if len(self) > 3 else ''}; {len(self)} sites)"

    @classmethod
    def ranked(cls, errors: Iterable[SiteError]) -> SiteErrors:
        """Sorts by own error, the worst first, NaN last; equal ones by accumulated error.

        Sites that are not finite are in front.

        Args:
            errors: in order of execution.
        """
        return cls(sorted(errors, key=lambda error: (False, False, 0.0, False, 0.0) if error.not_finite else (
            True, *_last(error.own_sqnr_db), *_last(error.sqnr_db))))


def _not_finite(error: SiteError, first: SiteError) -> str:
    """Says how many values of a site are not finite, and where they begin."""
    return "" if not error.not_finite else f"{error.not_finite}, the first" if error is first else str(error.not_finite)


def _last(value: float) -> tuple[bool, float]:
    """Orders NaN behind all numbers."""
    return math.isnan(value), 0.0 if math.isnan(value) else value
