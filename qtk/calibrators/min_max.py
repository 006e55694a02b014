"""The range is from the smallest to the largest value seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qtk.core.encoding import HOST, Encoding, encodings_to, moved
from qtk.core.granularity import Granularity
from qtk.core.spec import QuantSpec
from qtk.errors import CalibrationError
from qtk.numerics.ranges import choose_range
from qtk.observers import min_max, moving_average
from qtk.observers.observer import Observer
from qtk.public import public


@public
@dataclass(frozen=True, slots=True)
class MinMax:
    """Takes the smallest and the largest value seen as the range."""

    def observer(self, granularity: Granularity, *, static: bool = False) -> min_max.MinMax:
        return min_max.MinMax(granularity)

    def encodings(self, observers: Sequence[Observer], specs: Sequence[QuantSpec]) -> list[Encoding]:
        """The encodings whose ranges are the observed ones. Raises: CalibrationError if a scale saw nothing."""
        return encodings_of_ranges(observers, specs)


def encodings_of_ranges(observers: Sequence[Observer], specs: Sequence[QuantSpec]) -> list[Encoding]:
    """The encoding of the range of each observer. Raises: CalibrationError if a scale saw nothing."""
    bounds: list[Tensor] = []
    for observer in observers:
        assert isinstance(observer, min_max.MinMax | moving_average.MovingAverage)
        minimum, maximum = observer.minimum, observer.maximum
        if minimum is None or maximum is None:
            raise CalibrationError("no data was observed; calibrate with data that reaches this site")
        bounds += minimum, maximum
    device = bounds[0].device if bounds else HOST
    on_host = moved(bounds, HOST)
    ranges = list(zip(on_host[::2], on_host[1::2], specs, strict=True))
    together = _of_one_scale(ranges)
    return encodings_to([together[index] if index in together else encoding_of_range(*each)
                         for index, each in enumerate(ranges)], device)


def _of_one_scale(ranges: Sequence[tuple[Tensor, Tensor, QuantSpec]]) -> dict[int, Encoding]:
    """Index → encoding of the ranges of one scale, computed together where their spec is the same.

    An op on a small tensor takes as long as one on all of them.
    """
    of_spec: dict[QuantSpec, list[int]] = {}
    for index, (low, _, spec) in enumerate(ranges):
        if low.shape == (1,) and spec.scale_format is None:
            of_spec.setdefault(spec, []).append(index)
    encodings: dict[int, Encoding] = {}
    for spec, indices in of_spec.items():
        low = torch.cat([ranges[index][0] for index in indices])
        high = torch.cat([ranges[index][1] for index in indices])
        encodings |= zip(indices, encoding_of_range(low, high, spec).split(), strict=True)
    return encodings


def encoding_of_range(minimum: Tensor, maximum: Tensor, spec: QuantSpec) -> Encoding:
    """The encoding of a range.

    Shape: ``minimum``, ``maximum`` the qparam shape; NaN where a scale saw nothing.

    Raises: CalibrationError if there is no range.
    """
    unseen = minimum.isnan()
    if bool(unseen.any()):
        which = ", ".join(str(tuple(index)) for index in unseen.nonzero()[:8].tolist())
        raise CalibrationError(
            f"{int(unseen.sum())} of {unseen.numel()} scales saw only attention-mask sentinels (−inf and the like), "
            f"at {which}; calibrate with data that is not masked there, or quantize this site per tensor"
        )
    return Encoding(spec, *choose_range(minimum, maximum, spec))
