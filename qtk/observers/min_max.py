"""Running minimum and maximum."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qtk.core.granularity import Granularity
from qtk.errors import CalibrationError
from qtk.observers.extremes import Counted, Extremes, Running, extremes, on_cpu, with_infinite_mask


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
        self._running: Running | None = None  # on an accelerator, what the ends and counts are parts of

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
        running = None if on_cpu(x) or not x.numel() else self._running_for(x)
        if running is not None:
            running.add(with_infinite_mask(x) if self.finds_mask else x, self.granularity,
                        allows_mask=self.allows_mask)
            return
        batch = extremes(x, self.granularity, allows_mask=self.allows_mask, finds_mask=self.finds_mask)
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
            self._take(Extremes(other._low.clone(), other._high.clone(), other.count, other.sentinels))
        self._add_all(other)

    def _running_for(self, x: Tensor) -> Running | None:
        """Returns what a tensor of an accelerator adds to in place; ``None`` if that is elsewhere, or joined."""
        running = self._running
        if self._low is None:
            running = self._running = Running.empty(x, self.granularity)
            self._low, self._high = running.low, running.high
            self._count, self._sentinels, self._broken = running.counts.unbind()
        if running is None or self._low is not running.low or not isinstance(self._count, Tensor):
            return None
        if x.device != running.low.device:
            return None
        same_shape(running.low.shape, self.granularity.qparam_shape(tuple(x.shape)))
        return running

    def _take(self, batch: Extremes) -> None:
        low, high = batch.low, batch.high
        if batch.seen is not None:
            low, high = low.where(batch.seen, torch.inf), high.where(batch.seen, -torch.inf)
        if self._low is None or self._high is None:
            self._low, self._high = low, high
            return
        same_shape(self._low.shape, low.shape)
        self._low = torch.minimum(self._low.to(low.device), low)
        self._high = torch.maximum(self._high.to(high.device), high)


def same_shape(before: Sequence[int], now: Sequence[int]) -> None:
    """Raises: CalibrationError if the shape of the scales changed between two tensors."""
    if tuple(before) != tuple(now):
        raise CalibrationError(
            f"the statistics of this site have shape {tuple(before)}, the next tensor gives {tuple(now)}; "
            "every batch must have the same channels"
        )
