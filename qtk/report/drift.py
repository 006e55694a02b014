"""How far a simulation with states leaves float, step by step."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

WARM_UP = 10
"""First steps, in which the error of the states builds up, that do not count where there are four times as many."""

LARGEST_GROWTH_DB = 1.0
"""Growth of the error, from the first quarter of the steps to the last, that is called bounded."""


@dataclass(frozen=True, slots=True)
class Drift:
    """The error of a simulation along a sequence.

    Args:
        sqnr_db: SQNR of the outputs against the float model, of each step; both carry states of their own.

    >>> print(Drift((38.0, 37.0, 37.2, 37.9)))
    bounded: +0.1 dB over 4 steps (mean SQNR 37.5 dB, lowest 37.0 dB at step 2)
    >>> Drift(tuple(40.0 - step / 2 for step in range(40))).verdict
    'grows: +11.5 dB over 40 steps'
    """

    sqnr_db: tuple[float, ...]

    @property
    def growth_db(self) -> float:
        """By how much the error grows: mean SQNR of the first quarter of the steps less mean SQNR of the last."""
        first, last = self._quarters
        return statistics.fmean(first) - statistics.fmean(last)

    @property
    def is_bounded(self) -> bool:
        """Says whether the error grows by ``LARGEST_GROWTH_DB`` at most, or twice the standard error of its growth."""
        variances = [statistics.variance(each) / len(each) if len(each) > 1 else 0.0 for each in self._quarters]
        return self.growth_db <= max(LARGEST_GROWTH_DB, 2 * math.sqrt(sum(variances)))

    @property
    def verdict(self) -> str:
        """Says whether the error is bounded, in words."""
        return (f"{'bounded' if self.is_bounded else 'grows'}: {self.growth_db:+.1f} dB over {len(self.sqnr_db):,} "
                "steps")

    @property
    def _quarters(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        settled = self.sqnr_db[WARM_UP:] if len(self.sqnr_db) >= 4 * WARM_UP else self.sqnr_db
        quarter = max(len(settled) // 4, 1)
        return settled[:quarter], settled[-quarter:]

    def __str__(self) -> str:
        lowest = min(self.sqnr_db)
        return (f"{self.verdict} (mean SQNR {statistics.fmean(self.sqnr_db):.1f} dB, lowest {lowest:.1f} dB at step "
                f"{self.sqnr_db.index(lowest) + 1:,})")
