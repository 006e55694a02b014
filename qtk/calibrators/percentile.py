"""The range between two quantiles; the values outside are clipped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qtk.calibrators.search import Sampled, choose_all, sampler
from qtk.core.encoding import Encoding
from qtk.core.granularity import Granularity
from qtk.core.spec import QuantSpec
from qtk.errors import CalibrationError
from qtk.numerics.ranges import covering_range
from qtk.observers.observer import Observer
from qtk.observers.weighted_samples import WeightedSamples
from qtk.public import public


@public
@dataclass(frozen=True, slots=True)
class Percentile:
    """The upper end is the least value with ``quantile`` or more of all values at or below it; the lower mirrors it.

    Of n weights the upper end is the ⌈quantile · n⌉-th smallest. Activations are counted in a histogram: the
    end is the outer edge of the bin that holds that value, or the extreme, if that is nearer.

    Args:
        quantile: more than 0.5, at most 1; 1 is the full observed range.
        bins: smallest number of histogram bins over the range of an activation.

    Raises: CalibrationError if ``quantile`` is out of range.
    """

    quantile: float = 0.9999
    bins: int = 1024

    def __post_init__(self) -> None:
        if not 0.5 < self.quantile <= 1:
            raise CalibrationError(f"quantile must be more than 0.5 and at most 1, got {self.quantile}")

    def observer(self, granularity: Granularity, *, static: bool = False) -> Sampled:
        return sampler(granularity, static=static, bins=self.bins)

    def encodings(self, observers: Sequence[Observer], specs: Sequence[QuantSpec]) -> list[Encoding]:
        """The encodings of the ranges between the two quantiles. Raises: CalibrationError if a scale saw nothing."""
        return choose_all(observers, specs, self._choose)

    def _choose(self, samples: WeightedSamples, spec: QuantSpec) -> tuple[Tensor, Tensor | None]:
        low, high = self._range(samples)
        return covering_range(low, high, spec)

    def _range(self, samples: WeightedSamples) -> tuple[Tensor, Tensor]:
        if samples.counts is None:
            elements = samples.values.shape[1]
            last = math.ceil(self.quantile * elements)
            if last == elements:
                return samples.low, samples.high
            ends = (samples.values.kthvalue(rank).values for rank in (elements - last + 1, last))
            low, high = (end.to(torch.float64) for end in ends)
            return low, high
        values, order = (samples.values, None) if samples.binned else samples.values.sort(1)
        counts = samples.counts if order is None else samples.counts.gather(1, order)
        below = counts.cumsum(1)
        total = below[:, -1:]
        wanted = (total.double() * self.quantile).ceil().long()
        upper = values.gather(1, (below < wanted).sum(1, keepdim=True))[:, 0].to(torch.float64)
        lower = values.gather(1, (below <= total - wanted).sum(1, keepdim=True))[:, 0].to(torch.float64)
        width = 2 * samples.reach  # bins begin at multiples of it; 0 for single elements
        divisor = width.where(width > 0, 1.0)
        upper = torch.where(width > 0, ((upper / divisor).floor() + 1) * divisor, upper)
        lower = torch.where(width > 0, (lower / divisor).floor() * divisor, lower)
        return lower.clamp(min=samples.low), upper.clamp(max=samples.high)
