"""Exponential average of each batch's minimum and maximum."""

from __future__ import annotations

from torch import Tensor

from qtk.core.granularity import Granularity
from qtk.observers.min_max import MinMax


class MovingAverage(MinMax):
    """``state ← state + momentum · (batch - state)`` of both extremes; the first batch is taken whole.

    Args:
        momentum: weight of the newest batch, 0 < momentum ≤ 1.
    """

    def __init__(self, granularity: Granularity, *, momentum: float = 0.1) -> None:
        super().__init__(granularity)
        self.momentum = momentum

    def take(self, minimum: Tensor, maximum: Tensor) -> None:
        if self.minimum is None or self.maximum is None:
            self.minimum, self.maximum = minimum, maximum
        else:
            self.minimum = self.minimum.lerp(minimum, self.momentum)
            self.maximum = self.maximum.lerp(maximum, self.momentum)

    def merge(self, other: MinMax) -> None:
        """The average of both states, weighted by the elements they saw: order of batches is not kept across states."""
        if other.minimum is None or other.maximum is None:
            self.sentinels += other.sentinels
            return
        if self.minimum is None or self.maximum is None:
            self.minimum, self.maximum = other.minimum, other.maximum
        else:
            share = other.count / (self.count + other.count)
            self.minimum = self.minimum.lerp(other.minimum, share)
            self.maximum = self.maximum.lerp(other.maximum, share)
        self.count += other.count
        self.sentinels += other.sentinels
