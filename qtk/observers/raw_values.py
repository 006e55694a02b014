"""Raw values: every element, for weights, which are observed once."""

from __future__ import annotations

import torch
from torch import Tensor

from qtk.core.granularity import Granularity
from qtk.errors import CalibrationError
from qtk.numerics.blocks import split_shape
from qtk.observers.extremes import Counted, extremes, sentinel_bound
from qtk.observers.weighted_samples import WeightedSamples


class RawValues(Counted):
    """Keeps every element, so that a search computes its error on the values themselves."""

    def __init__(self, granularity: Granularity) -> None:
        super().__init__()
        self.granularity = granularity
        self._seen: list[Tensor] = []  # [scales, elements] each
        self._ends: list[tuple[Tensor, Tensor]] = []  # the extremes of each, float32
        self._shape: tuple[int, ...] = ()

    @torch.no_grad()
    def observe(self, x: Tensor) -> None:
        """Observes one tensor. Raises: CalibrationError if it holds NaN or +inf, or has another number of channels."""
        batch = extremes(x, self.granularity, allows_mask=self.allows_mask, finds_mask=self.finds_mask)
        if batch is None:
            return
        if self._seen and self._shape != tuple(batch.low.shape):
            raise CalibrationError(f"the scales of this site have shape {self._shape}, the scales of the next tensor "
                                   f"{tuple(batch.low.shape)}; every tensor must have the same channels")
        self._shape = tuple(batch.low.shape)
        split, inside = split_shape(x.shape, self.granularity.block_size(x.ndim))
        outside = [axis for axis in range(len(split)) if axis not in inside]
        self._seen.append(x.detach().reshape(split).permute(*outside, *inside).reshape(batch.low.numel(), -1))
        self._ends.append((batch.low.flatten(), batch.high.flatten()))
        self._add(batch)

    def merge(self, other: RawValues) -> None:
        """Adds the statistics of ``other``. Raises: CalibrationError if its granularity or shape differs."""
        if other.granularity != self.granularity or (self._seen and other._seen and self._shape != other._shape):
            raise CalibrationError(f"tensors {other.granularity} of {other._shape} scales cannot join tensors "
                                   f"{self.granularity} of {self._shape}")
        self._shape = other._shape or self._shape
        self._seen += other._seen
        self._ends += other._ends
        self._add_all(other)

    @property
    def shape(self) -> tuple[int, ...]:
        """The qparam shape."""
        return self._shape

    def samples(self) -> WeightedSamples:
        """Every element. Raises: CalibrationError if nothing was seen."""
        if not self.count:
            raise CalibrationError("no data was observed; calibrate with data that reaches this site")
        values = self._seen[0] if len(self._seen) == 1 else torch.cat(self._seen, dim=1)
        counts = None
        ends = self._ends if values.dtype != torch.float64 else [(values.amin(1), values.amax(1))]
        low = torch.stack([each for each, _ in ends]).amin(0).to(torch.float64)
        high = torch.stack([each for _, each in ends]).amax(0).to(torch.float64)
        if self.sentinels:
            masked = values <= sentinel_bound(values.dtype)
            low, high = values.masked_fill(masked, torch.inf).amin(1), values.masked_fill(masked, -torch.inf).amax(1)
            low, high = (bound.to(torch.float64).masked_fill(low > high, torch.nan) for bound in (low, high))
            counts, values = (~masked).to(torch.int64), values.masked_fill(masked, 0.0)
        return WeightedSamples(values, counts, low, high, torch.zeros_like(low), binned=False)
