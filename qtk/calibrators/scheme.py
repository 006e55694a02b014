"""The names users give to ways of finding ranges. To add one, add its line here."""

from __future__ import annotations

from typing import Protocol

from qtk.calibrators.min_max import MinMax
from qtk.calibrators.moving_average import MovingAverage
from qtk.core.encoding import Encoding
from qtk.core.granularity import Granularity
from qtk.core.spec import QuantSpec
from qtk.observers.observer import Observer
from qtk.registry import Registry


class Calibrator(Protocol):
    """Pairs the statistics it needs with the decision it makes from them."""

    def observer(self, granularity: Granularity) -> Observer:
        """A fresh observer for one site."""
        ...

    def encoding(self, observer: Observer, spec: QuantSpec) -> Encoding:
        """The encoding for what ``observer``, one of this calibrator's, saw.

        Raises: CalibrationError if that was nothing.
        """
        ...


SCHEMES = Registry[Calibrator]("scheme")
SCHEMES.add("min_max", MinMax(), aliases=("post_training_tf",))
SCHEMES.add("moving_average", MovingAverage())
