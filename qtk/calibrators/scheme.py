"""The names users give to ways of finding ranges. To add one, add its line here."""

from __future__ import annotations

from typing import Any, Protocol

from qtk.calibrators.min_max import RangeCalibrator
from qtk.core.encoding import Encoding
from qtk.core.granularity import Granularity
from qtk.core.spec import QuantSpec
from qtk.observers.min_max import MinMax
from qtk.observers.moving_average import MovingAverage
from qtk.registry import Registry


class Calibrator(Protocol):
    """Pairs the statistics it needs with the decision it makes from them."""

    def observer(self, granularity: Granularity, /) -> Any:
        """A fresh observer for one site."""

    def encoding(self, observer: Any, spec: QuantSpec) -> Encoding:
        """The encoding for what ``observer`` saw. Raises: CalibrationError if that was nothing."""
        ...


SCHEMES = Registry[Calibrator]("scheme")
SCHEMES.add("min_max", RangeCalibrator(MinMax), aliases=("post_training_tf",))
SCHEMES.add("moving_average", RangeCalibrator(MovingAverage))
