"""The range is from the smallest to the largest value seen."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qtk.core.encoding import HOST, Encoding, encodings_to, moved
from qtk.core.granularity import Granularity
from qtk.core.spec import PER_TENSOR, QuantSpec
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
    return encodings_to(encodings_of(list(zip(on_host[::2], on_host[1::2], specs, strict=True))), device)


def encodings_of(ranges: Sequence[tuple[Tensor, Tensor, QuantSpec]]) -> list[Encoding]:
    """The encodings of ranges, computed together where they have the same codes.

    An op on a small tensor takes as long as one on many. Scales that are stored in few bits depend on each other.

    Args:
        ranges: minimum, maximum and spec of each; as of ``encoding_of_range``.

    Raises: CalibrationError if there is no range.
    """
    encodings: dict[int, Encoding] = {}
    same_codes: dict[QuantSpec, list[int]] = defaultdict(list)
    for index, (minimum, maximum, spec) in enumerate(ranges):
        if spec.scale_format is None:
            same_codes[replace(spec, granularity=PER_TENSOR)].append(index)
        else:
            encodings[index] = encoding_of_range(minimum, maximum, spec)
    for codes, indices in same_codes.items():
        minima, maxima, specs = zip(*(ranges[index] for index in indices), strict=True)
        try:
            low, high = (torch.cat([end.reshape(-1) for end in ends]) for ends in (minima, maxima))
            joined = encoding_of_range(low, high, codes)
        except CalibrationError:  # each alone says where
            encodings |= {index: encoding_of_range(*ranges[index]) for index in indices}
        else:
            shapes = [minimum.shape for minimum in minima]
            encodings |= zip(indices, joined.split(list(zip(specs, shapes, strict=True))), strict=True)
    return [encodings[index] for index in range(len(ranges))]


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
