"""How far a runtime's values are from the simulation's, over all data."""

from __future__ import annotations

import math
from collections.abc import Sequence
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


MOST_STRAY, STRAY_STEPS = 2, 4.0
"""Values on the edge of two codes, and how far they may take a value: where so few would be too large a share."""


def are_too_few(difference: Difference, share: float | None) -> bool:
    """Says whether one or two values alone, a few steps off, are the ``share`` that is too large."""
    steps = difference.max_steps
    return share is not None and steps is not None and (
        share * difference.elements <= MOST_STRAY and steps <= STRAY_STEPS)


def far_outputs(outputs: Sequence[Difference], tolerances_db: Sequence[float] = ()) -> list[Difference]:
    """The outputs that are not close to the simulation's, each by its own SQNR.

    Args:
        outputs: the differences of each output.
        tolerances_db: the SQNR that each output of a right file may have; none: a high one.

    >>> right = Difference("y", elements=20, differing=0.0, beyond_one_step=0.0, max_difference=0, max_steps=0,
    ...                    sqnr_db=math.inf)
    >>> wrong = Difference("z", elements=20, differing=1.0, beyond_one_step=None, max_difference=1, max_steps=None,
    ...                    sqnr_db=10.0)
    >>> [each.name for each in far_outputs([right, wrong])], far_outputs([right, wrong], [35.0, 9.0])
    (['z'], [])
    """
    least = tolerances_db or [HIGH_SQNR_DB] * len(outputs)
    return [each for each, least_db in zip(outputs, least, strict=True) if not is_close(each, least_db)]
