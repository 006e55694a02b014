"""``WeightedSamples``: values seen by each scale, with counts: single elements, or middles of histogram bins."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class WeightedSamples:
    """The sampled distribution of every scale, over which calibrators search.

    Each of ``values`` represents ``counts`` elements, or elements of that weight together, which differ from it by at
    most ``reach`` (half a bin) and are in [low, high].

    Shape: ``values``, of a floating dtype, and ``counts`` int64 (weights: float64) [scales, samples]; ``counts`` is
    ``None`` where each value is one element; ``low``, ``high``, ``reach`` float64 [scales], NaN for a scale that saw
    nothing. ``binned``: they are middles of bins, which ascend, else single elements, whose ``reach`` is 0.
    """

    values: Tensor
    counts: Tensor | None
    low: Tensor
    high: Tensor
    reach: Tensor
    binned: bool

    @property
    def scales(self) -> int:
        return len(self.values)

    @property
    def kind(self) -> tuple[object, ...]:
        """Key of equal samples: samples with the same key can be concatenated along the scales."""
        return self.values.shape[1], self.counts is None, self.binned, self.values.dtype, self.values.device

    def of(self, scales: slice | Tensor) -> WeightedSamples:
        """The samples of some of the scales."""
        return WeightedSamples(
            self.values[scales], None if self.counts is None else self.counts[scales], self.low[scales],
            self.high[scales], self.reach[scales], self.binned,
        )
