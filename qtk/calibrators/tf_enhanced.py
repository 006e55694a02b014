"""Minimises the squared quantization error over scale and zero point: AIMET's tf_enhanced.

The candidates are the same as in AIMET 2.x: with N = qmax - qmin and the observed range widened to hold 0,

    symmetric     scales k/100 of the scale that holds the range, k = 1…101
    asymmetric    scales k/16 of it, k = 1…17, each with 20 starts of the range from -N to 0 scales, and with the
                  observed minimum as its start; every range clamped to the observed one

scales being at least ``min(2^-23, 0.01/N)``. The cost is ``Σ count · (x - x̂)²``, times ``gamma`` where x is clipped,
computed in float64; the first of equal candidates wins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from qtk.calibrators import tf_enhanced_v1
from qtk.calibrators.search import least_error, sampler
from qtk.core.encoding import Encoding
from qtk.core.granularity import Granularity
from qtk.core.spec import QuantSpec
from qtk.errors import CalibrationError
from qtk.numerics.ranges import held_scale
from qtk.observers.first_batch_histogram import FirstBatchHistogram
from qtk.observers.observer import Observer
from qtk.public import public

STEPS, STEPS_SYMMETRIC, PLACES = 16, 100, 20


@public
@dataclass(frozen=True, slots=True)
class TfEnhanced:
    """Minimises the squared error over scale and zero point, errors of clipped values weighted by ``gamma``.

    The error of a weight is summed over its elements, the error of an activation over the middles of histogram bins.

    Args:
        bins: smallest number of histogram bins over the range of an activation.
        growth: how far later batches may extend the range of the first, see ``Histogram``; ``None``: without limit. It
            was 3 in AIMET 2.x, where values beyond count in the outermost bins.
        gamma: weight of the error of a clipped value.
        variant: ``v2`` as in AIMET 2.x; ``v1`` as in AIMET's older C++ library, see ``qtk.calibrators.tf_enhanced_v1``;
            its bins are fixed by the first batch.

    Raises: CalibrationError if a setting is out of range, or contradicts ``v1``.
    """

    bins: int = 512
    growth: float | None = None
    gamma: float = 3.0
    variant: Literal["v1", "v2"] = "v2"

    def __post_init__(self) -> None:
        if not 0 < self.gamma < math.inf:
            raise CalibrationError(f"gamma must be more than 0 and finite, got {self.gamma}")
        if self.variant == "v1" and (self.bins, self.growth) != (512, None):
            raise CalibrationError("variant v1 has 512 bins over three times the first batch's range; leave bins and "
                                   "growth out")

    def observer(self, granularity: Granularity, *, static: bool = False) -> Observer:
        if self.variant == "v1":
            return FirstBatchHistogram(granularity)
        return sampler(granularity, static=static, bins=self.bins, growth=self.growth)

    def encodings(self, observers: Sequence[Observer], specs: Sequence[QuantSpec]) -> list[Encoding]:
        """The encodings of least error. Raises: CalibrationError if a scale saw nothing."""
        if self.variant == "v1":
            return tf_enhanced_v1.encodings(observers, specs, gamma=self.gamma)
        return least_error(observers, specs, propose, norm=2, clipped=self.gamma)


def propose(low: Tensor, high: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor | None]:
    """The candidates of AIMET 2.x for every scale.

    Shape: ``low``, ``high`` float64 [scales]; scales float32 and zero points int32 or ``None``, [candidates, scales].
    """
    steps = spec.qmax - spec.qmin
    smallest = min(2.0**-23, 0.01 / steps)
    low, high = low.clamp(max=0.0), high.clamp(min=smallest * steps)
    if spec.symmetric:
        fraction = torch.arange(1, STEPS_SYMMETRIC + 2, dtype=torch.float64, device=low.device) / STEPS_SYMMETRIC
        widest = 2 * torch.maximum(high, -low) / steps
        return held_scale((widest * fraction[:, None]).clamp(min=smallest), 0.0, spec), None
    widest = (high - low) / steps
    start = (low / widest).round()
    lowest = widest * start
    highest = lowest + widest * steps
    fraction = torch.arange(1, STEPS + 2, dtype=torch.float64, device=low.device) / STEPS
    places = min(PLACES, int(steps) + 1)
    fixed = torch.linspace(-steps, 0, places, dtype=torch.float64, device=low.device).round()
    starts = torch.cat([fixed[:, None].expand(-1, len(low)), start[None]])  # [places + 1, scales]
    scale = widest * fraction[:, None, None]
    first = torch.minimum(torch.maximum(scale * starts, lowest), highest)
    last = torch.minimum(torch.maximum(scale * starts + scale * steps, lowest), highest)
    scale = ((last - first) / steps).clamp(min=smallest).flatten(0, 1)
    zero_point = (spec.qmin - (first.flatten(0, 1) / scale).round()).clamp(spec.qmin, spec.qmax)
    return held_scale(scale, zero_point, spec), zero_point.to(torch.int32)
