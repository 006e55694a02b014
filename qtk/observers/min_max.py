"""Running minimum and maximum."""

from __future__ import annotations

import torch
from torch import Tensor

from qtk.core.granularity import Granularity
from qtk.errors import CalibrationError
from qtk.observers.extremes import Counted, Extremes, extremes


class MinMax(Counted):
    """Smallest and largest value seen by each scale.

    >>> from qtk.core.granularity import PerTensor
    >>> observer = MinMax(PerTensor())
    >>> observer.observe(torch.tensor([1.0, -2.0, -torch.inf]))
    >>> observer.minimum, observer.maximum, observer.count, observer.sentinels
    (tensor([-2.]), tensor([1.]), 2, 1)
    """

    def __init__(self, granularity: Granularity) -> None:
        super().__init__()
        self.granularity = granularity
        self._low: Tensor | None = None
        self._high: Tensor | None = None

    @property
    def minimum(self) -> Tensor | None:
        """Smallest value seen, ``None`` until there is one; NaN for a scale that saw none, only sentinels.

        Shape: float32 in the qparam shape.
        """
        return None if self._low is None else self._low.masked_fill(self._low == torch.inf, torch.nan)

    @property
    def maximum(self) -> Tensor | None:
        """Largest value seen; as ``minimum``."""
        return None if self._high is None else self._high.masked_fill(self._high == -torch.inf, torch.nan)

    @torch.no_grad()
    def observe(self, x: Tensor) -> None:
        """Observes one tensor. Raises: CalibrationError if it holds NaN or +inf, or has another number of channels."""
        batch = extremes(x, self.granularity, allows_mask=self.allows_mask)
        if batch is None:
            return
        if not batch.nothing:
            self._take(batch)
        self._add(batch)

    def merge(self, other: MinMax) -> None:
        """Adds the statistics of ``other``. Raises: CalibrationError if its granularity or shape differs."""
        if other.granularity != self.granularity:
            raise CalibrationError(f"statistics {other.granularity} cannot join statistics {self.granularity}")
        if other._low is not None and other._high is not None:
            self._take(Extremes(other._low, other._high, other.count, other.sentinels))
        self._add_all(other)

    def _take(self, batch: Extremes) -> None:
        low, high = batch.low, batch.high
        if batch.seen is not None:
            low, high = low.where(batch.seen, torch.inf), high.where(batch.seen, -torch.inf)
        if self._low is None or self._high is None:
            self._low, self._high = low, high
            return
        same_shape(self._low, low)
        self._low = torch.minimum(self._low.to(low.device), low)
        self._high = torch.maximum(self._high.to(high.device), high)


def same_shape(before: Tensor, now: Tensor) -> None:
    """Raises: CalibrationError if the number of scales changed between two tensors."""
    if before.shape != now.shape:
        raise CalibrationError(
            f"the statistics of this site have shape {tuple(before.shape)}, the next tensor gives {tuple(now.shape)}; "
            "every batch must have the same channels"
        )
