"""The range is an exponential average over the ranges of the batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qtk.calibrators.min_max import encodings_of_ranges
from qtk.core.encoding import Encoding
from qtk.core.granularity import Granularity
from qtk.core.spec import QuantSpec
from qtk.observers import moving_average
from qtk.observers.observer import Observer
from qtk.public import public


@public
@dataclass(frozen=True, slots=True)
class MovingAverage:
    """Takes the exponential averages of each batch's minimum and maximum as the range.

    Args:
        momentum: weight of the newest batch, 0 < momentum ≤ 1.
    """

    momentum: float = 0.1

    def observer(self, granularity: Granularity, *, static: bool = False) -> moving_average.MovingAverage:
        """A fresh observer. Raises: CalibrationError if ``momentum`` is not in (0, 1]."""
        return moving_average.MovingAverage(granularity, momentum=self.momentum)

    def encodings(self, observers: Sequence[Observer], specs: Sequence[QuantSpec]) -> list[Encoding]:
        """The encodings of the averaged ranges. Raises: CalibrationError if a scale saw nothing."""
        return encodings_of_ranges(observers, specs)
