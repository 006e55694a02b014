"""What searches over ranges look at: the numbers of each scale, or the bins they fell into, and how often."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class WeightedSamples:
    """``counts`` elements of a scale lie within ``reach`` of each of its ``values``, all of them in [low, high].

    Shape: ``values``, of a floating dtype, and ``counts`` int64 [scales, points]; ``counts`` is ``None`` where each
    counts once; ``low``, ``high``, ``reach`` float64 [scales], NaN for a scale that saw nothing. Values that are bins
    ascend.
    """

    values: Tensor
    counts: Tensor | None
    low: Tensor
    high: Tensor
    reach: Tensor

    @property
    def scales(self) -> int:
        return len(self.values)

    @property
    def kind(self) -> tuple[object, ...]:
        """WeightedSamples of one kind can be put under one another."""
        return self.values.shape[1], self.counts is None, self.values.dtype, self.values.device

    def of(self, scales: slice | Tensor) -> WeightedSamples:
        """Those of some of the scales."""
        return WeightedSamples(
            self.values[scales], None if self.counts is None else self.counts[scales], self.low[scales],
            self.high[scales], self.reach[scales],
        )
