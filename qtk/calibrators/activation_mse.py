"""Minimises what quantizing an activation does to the outputs of the layers that read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qtk.calibrators.search import choose_all
from qtk.core.bounds import check_count
from qtk.core.dtypes import FloatDtype
from qtk.core.encoding import Encoding
from qtk.core.granularity import Granularity
from qtk.core.spec import QuantSpec
from qtk.numerics.ranges import covering_range
from qtk.observers.observer import Observer
from qtk.observers.raw_values import RawValues
from qtk.observers.weighted_histogram import WeightedHistogram
from qtk.observers.weighted_samples import WeightedSamples
from qtk.ops.least_candidate import least_candidate
from qtk.public import public

MOST_STEPS = 1_000
ROUNDS = 2
"""Of the search over both ends of a range in turn."""


@public
@dataclass(frozen=True, slots=True)
class ActivationMse:
    """Minimises ``Σ wᵢ (xᵢ - x̂ᵢ)²``; w is what a change of the value does to the outputs that are computed from it.

    ``wᵢ = Σₒ (∂yₒ/∂xᵢ)²`` over the outputs y of the matrix products and convolutions that read the value, directly or
    through other ops: of a linear layer, the squares of the weights that multiply it. A calibration estimates it in the
    same pass, by gradients of outputs with random signs (Hutchinson's estimator; Bekas, Kokiopoulou and Saad, 2007),
    which takes the time and memory of a training step in float. Weights, and where no gradient is known: w = 1.

    Both ends of the range are shrunk together, then each by itself: ``i/steps`` times the observed ones.

    Args:
        steps: number of ranges tried at a time.
        bins: smallest number of histogram bins over the range of an activation.

    Raises: CalibrationError if ``steps`` is not 1 to 1,000.
    """

    steps: int = 64
    bins: int = 1024

    def __post_init__(self) -> None:
        check_count("steps of activation_mse", self.steps, MOST_STEPS)

    def observer(self, granularity: Granularity, *, static: bool = False) -> Observer:
        streaming = WeightedHistogram(granularity, bins=self.bins)
        return RawValues(granularity) if static else streaming

    def encodings(self, observers: Sequence[Observer], specs: Sequence[QuantSpec]) -> list[Encoding]:
        """The encodings of least error found. Raises: CalibrationError if a scale saw nothing."""
        return choose_all(observers, specs, self._choose)

    def _choose(self, samples: WeightedSamples, spec: QuantSpec) -> tuple[Tensor, Tensor | None]:
        if isinstance(spec.dtype, FloatDtype):  # its steps follow the values
            return covering_range(samples.low, samples.high, spec)
        low, high = samples.low.clamp(max=0), samples.high.clamp(min=0)  # a range holds 0
        fraction = torch.arange(1, self.steps + 1, dtype=torch.float64, device=low.device)[:, None] / self.steps
        lows, highs = low * fraction, high * fraction
        low, high = self._best(samples, spec, lows, highs)
        for _ in range(0 if spec.symmetric else ROUNDS):
            low, high = self._best(samples, spec, lows, high.expand_as(lows))
            low, high = self._best(samples, spec, low.expand_as(highs), highs)
        return covering_range(low, high, spec)

    def _best(self, samples: WeightedSamples, spec: QuantSpec, lows: Tensor, highs: Tensor) -> tuple[Tensor, Tensor]:
        """The ends of least error. Shape: [candidates, scales]; results [scales]."""
        best = least_candidate(samples.values, *covering_range(lows, highs, spec), int(spec.qmin), int(spec.qmax),
                               counts=samples.counts)[None]
        return lows.gather(0, best)[0], highs.gather(0, best)[0]
