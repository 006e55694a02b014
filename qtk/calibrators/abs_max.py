"""The scale is the largest magnitude seen, over half the span of the codes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qtk.calibrators.min_max import encodings_of_ranges
from qtk.core.encoding import Encoding
from qtk.core.granularity import Granularity
from qtk.core.spec import QuantSpec
from qtk.observers import min_max
from qtk.observers.observer import Observer
from qtk.public import public

OFF_THE_TIE = 1 - 2**-12
"""By how much scales are smaller, so that the largest magnitude is no tie of two codes that float noise decides."""


@public
@dataclass(frozen=True, slots=True)
class AbsMax:
    """Takes ``max|x| / ((qmax - qmin) / 2)`` as the scale of symmetric codes; other ranges are those of ``min_max``.

    It is less by 1/4096: the most negative value is qmin then, whatever noise or factor a fold brings. The positive end
    loses half a code, and all other codes are nearer to each other than those of ``min_max`` where the largest value is
    positive: by 1/16 at 4 bits, 1/7 at 3, 1/3 at 2.
    """

    def observer(self, granularity: Granularity, *, static: bool = False) -> min_max.MinMax:
        return min_max.MinMax(granularity)

    def encodings(self, observers: Sequence[Observer], specs: Sequence[QuantSpec]) -> list[Encoding]:
        """The encodings of the observed magnitudes. Raises: CalibrationError if a scale saw nothing."""
        return encodings_of_ranges(observers, specs, _of_all_codes)


def _of_all_codes(low: Tensor, high: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """The bounds of the codes whose mean magnitude at both ends is the largest that was seen."""
    if not spec.symmetric or spec.scale_format is not None or spec.qmax == -spec.qmin:
        return low, high
    largest = torch.maximum(high, -low).to(torch.float64) * 2 * OFF_THE_TIE / (spec.qmax - spec.qmin)
    return largest * spec.qmin, largest * spec.qmax
