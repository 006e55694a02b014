"""The range is everything that was seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from qtk.core.encoding import Encoding
from qtk.core.granularity import Granularity
from qtk.core.spec import QuantSpec
from qtk.errors import CalibrationError
from qtk.numerics.ranges import choose_range
from qtk.observers.min_max import MinMax


@dataclass(frozen=True, slots=True)
class RangeCalibrator:
    """Takes the extremes its observer kept as the range.

    Args:
        observer: makes the observer of one site.
    """

    observer: Callable[[Granularity], MinMax]

    def encoding(self, observer: MinMax, spec: QuantSpec) -> Encoding:
        """The encoding that just holds what was seen. Raises: CalibrationError if nothing was."""
        if observer.minimum is None or observer.maximum is None:
            raise CalibrationError("no data was observed; calibrate with data that reaches this site")
        return Encoding(spec, *choose_range(observer.minimum, observer.maximum, spec))
