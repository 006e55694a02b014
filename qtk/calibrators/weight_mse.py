"""Minimises what rounding a weight does to an output, whose inputs are no white noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qtk.calibrators.search import Sampled, choose_all, sampler
from qtk.core.bounds import check_count
from qtk.core.dtypes import FloatDtype
from qtk.core.encoding import Encoding
from qtk.core.granularity import Granularity
from qtk.core.spec import QuantSpec
from qtk.errors import CalibrationError
from qtk.numerics.ranges import covering_range
from qtk.observers.observer import Observer
from qtk.observers.weighted_samples import WeightedSamples
from qtk.ops.least_output_error import least_output_error
from qtk.public import public

MOST_STEPS = 1_000
BINS = 1024

LEAST_REACH = 0.55
"""Half the span of the codes with the narrowest range tried, over the largest magnitude."""


@public
@dataclass(frozen=True, slots=True)
class WeightMse:
    """Minimises ``Σ d² + mean (Σ d)² / n + gain (Σ d w)² / Σ w²`` over shrunk ranges; d = w - ŵ, n elements a scale.

    Up to a factor this is the expected squared error of an output whose inputs vary more than white noise along two
    directions: ``1 + mean`` times along equal inputs, which have a mean, and ``1 + gain`` times along the weights
    themselves, which training has turned to what its inputs hold. Few codes that minimise ``Σ d²`` alone shrink
    every output by the same part, and layer after layer adds to it.

    The ranges shrink from the range of ``min_max`` ([-m, m] for symmetric codes, m the largest magnitude; else
    [minimum, maximum]) until half the span of the codes is 0.55 m. Activations are searched so too, on histograms.

    Args:
        mean: how much more the inputs vary along their mean.
        gain: how much more they vary along the weights.
        steps: number of ranges tried.

    Raises: CalibrationError if ``mean`` or ``gain`` is negative or not finite, or ``steps`` not 1 to 1,000.
    """

    mean: float = 2.0
    gain: float = 6.0
    steps: int = 16

    def __post_init__(self) -> None:
        if not (0 <= self.mean < math.inf and 0 <= self.gain < math.inf):
            raise CalibrationError(f"weight_mse needs a finite mean and gain ≥ 0, got {self.mean} and {self.gain}")
        check_count("steps of weight_mse", self.steps, MOST_STEPS)

    def observer(self, granularity: Granularity, *, static: bool = False) -> Sampled:
        return sampler(granularity, static=static, bins=BINS)

    def encodings(self, observers: Sequence[Observer], specs: Sequence[QuantSpec]) -> list[Encoding]:
        """The encodings of least error. Raises: CalibrationError if a scale saw nothing."""
        return choose_all(observers, specs, self._choose)

    def _choose(self, samples: WeightedSamples, spec: QuantSpec) -> tuple[Tensor, Tensor | None]:
        if isinstance(spec.dtype, FloatDtype):  # its steps follow the values
            return covering_range(samples.low, samples.high, spec)
        scales, zero_points = narrower_ranges(samples.low, samples.high, spec, self.steps)
        index = least_output_error(samples.values, scales, zero_points, int(spec.qmin), int(spec.qmax),
                                   mean=self.mean, gain=self.gain, counts=samples.counts)[None]
        return scales.gather(0, index)[0], None if zero_points is None else zero_points.gather(0, index)[0]


def narrower_ranges(low: Tensor, high: Tensor, spec: QuantSpec, steps: int) -> tuple[Tensor, Tensor | None]:
    """Scales and zero points of ranges from the range of the values down to ``LEAST_REACH`` of it, the widest first.

    Shape: ``low`` and ``high`` float64 [scales]; results [steps, scales].
    """
    least = LEAST_REACH
    if spec.symmetric:
        low, high = low.new_zeros(1), torch.maximum(high, -low)  # -high needs no larger scale, but of int32
        least *= 2 * spec.qmax / (spec.qmax - spec.qmin)
    fraction = torch.linspace(1, least, steps, dtype=torch.float64, device=low.device)[:, None]
    return covering_range(low * fraction, high * fraction, spec)
