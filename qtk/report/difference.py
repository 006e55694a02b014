"""How far a runtime's values are from the simulation's, over all data."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Difference:
    """The differences of one tensor, or of several together.

    Args:
        name: name of the output or site.
        elements: the number of values compared.
        differing: share of the values that are not bit-equal, 0…1.
        beyond_one_step: share of the values that are off by more than one step, the scale of their quantizer, 0…1;
            ``None`` without a quantizer.
        max_difference: the largest ``|runtime - simulation|``.
        max_steps: the largest, in steps; ``None`` without a quantizer.
        sqnr_db: ``10·log10(Σ simulation² / Σ (runtime - simulation)²)``; inf if all are equal.
        other_codes: share of the values that are off by more than half a step, 0…1; ``None`` without a quantizer.
    """

    name: str
    elements: int
    differing: float
    beyond_one_step: float | None
    max_difference: float
    max_steps: float | None
    sqnr_db: float
    other_codes: float | None = None

    def to_json(self) -> dict[str, object]:
        """Every field; numbers that are not finite are null, as in JSON."""
        return {
            "name": self.name, "elements": self.elements, "differing": self.differing,
            "beyond_one_step": self.beyond_one_step, "other_codes": self.other_codes,
            "max_difference": _finite(self.max_difference), "max_steps": _finite(self.max_steps),
            "sqnr_db": _finite(self.sqnr_db),
        }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


WITHIN_ONE_STEP = 0.999
"""The share of output values that must be within one step of the simulation's, unless SQNR is high."""

HIGH_SQNR_DB = 35.0
"""SQNR against the simulation above which a deep model computes what was simulated: what is left are values on
rounding edges, which differ by a step after float sums in another order, and what follows from them."""


def is_close(difference: Difference, tolerance_db: float = HIGH_SQNR_DB) -> bool:
    """Says whether values are within one step nearly everywhere, or have a high SQNR.

    Args:
        difference: of the values from the simulation's.
        tolerance_db: the SQNR that a right file may have (``qtk.runtimes.tolerance``), where that is lower.

    >>> close = Difference("y", elements=20, differing=0.05, beyond_one_step=0.05, max_difference=1, max_steps=2,
    ...                    sqnr_db=30.0)
    >>> is_close(close), is_close(close, tolerance_db=26.0)
    (False, True)
    """
    beyond = difference.beyond_one_step
    is_high = difference.sqnr_db >= min(HIGH_SQNR_DB, tolerance_db)
    return is_high or (beyond is not None and beyond <= 1 - WITHIN_ONE_STEP)
