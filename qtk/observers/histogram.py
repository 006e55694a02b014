"""Streaming histograms on grids whose bin width is a power of two.

The bin width is the smallest power of two with which the range seen so far fits into the bins; the first bin holds the
smallest value. Both follow from the range alone, and two neighbouring bins of a grid are one bin of the next wider
grid: so a histogram does not depend on the order of the data, no bin is ever split, and merging two histograms gives
the histogram of all their data.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qtk.core.granularity import Granularity
from qtk.errors import CalibrationError
from qtk.numerics.blocks import split_shape
from qtk.observers.extremes import Counted, extremes, on_cpu, sentinel_bound
from qtk.observers.min_max import same_shape
from qtk.observers.weighted_samples import WeightedSamples
from qtk.ops.statistics import histogram, histogram_and_min_max

SMALLEST_EXPONENT = -100
DIGITS = 24
"""Significant bits of float32: no bin is narrower than the last of them."""
MOST_AHEAD = 1 << (DIGITS - 1)
"""Bins up to this one from 0 have earlier ones that float32 holds too: half as many as a grid has, at most."""


@dataclass(frozen=True, slots=True, eq=False)
class _CountedAhead:
    """What one pass finds in a tensor: its extremes, and the counts on a grid, from ``below`` bins before it on.

    Shape: ``counts`` int64 [1, bins]; ``extremes``, and the grid's ``first`` bin and ``exponent``, [1].
    """

    counts: Tensor
    extremes: tuple[Tensor, Tensor]
    first: Tensor
    exponent: Tensor
    below: int

    def on(self, first: Tensor, exponent: Tensor, bins: int) -> Tensor | None:
        """The counts on another grid of ``bins`` bins, ``None`` if they do not tell. Shape: [1, bins]."""
        if exponent is not self.exponent and not torch.equal(exponent, self.exponent):
            return None
        offset = self.below if first is self.first else self.below + int(first - self.first)
        return self.counts.narrow(1, offset, bins) if 0 <= offset <= self.counts.shape[1] - bins else None


class Histogram(Counted):
    """A histogram for each scale, with ``bins`` to ``2 · bins`` bins between its minimum and maximum.

    Args:
        bins: smallest number of bins over the range.
        growth: if not ``None``, the range of the first batch, [low, high], is extended by at most
            ``growth · (high - low) / 2`` on either side; values beyond count in the outermost bins. Then the
            result depends on which batch comes first.

    >>> from qtk.core.granularity import PerTensor
    >>> observer = Histogram(PerTensor(), bins=2)
    >>> observer.observe(torch.tensor([0.0, 1.0, 1.5, 3.0]))
    >>> observer.counts, observer.edges
    (tensor([[1, 2, 0, 1]]), tensor([[0., 1., 2., 3., 4.]], dtype=torch.float64))
    """

    def __init__(self, granularity: Granularity, *, bins: int = 1024, growth: float | None = None) -> None:
        if bins < 2 or bins > 1 << 20:
            raise CalibrationError(f"bins must be 2 to {1 << 20}, got {bins}")
        if growth is not None and not growth >= 0:
            raise CalibrationError(f"growth must be at least 0, or None for any; got {growth}")
        super().__init__()
        self.granularity = granularity
        self.bins = bins
        self.growth = growth
        # [scales] each, counts [scales, 2 · bins]; low is inf and high -inf for a scale that saw no value
        self._low: Tensor | None = None
        self._high: Tensor | None = None
        self._limits: tuple[Tensor, Tensor] | None = None
        self._first: Tensor | None = None
        self._exponent: Tensor | None = None
        self._counts: Tensor | None = None
        self._shape: torch.Size | None = None

    @property
    def minimum(self) -> Tensor | None:
        """Lower end of the range, ``None`` until something was seen; NaN for a scale that saw only sentinels.

        Shape: float32 in the qparam shape.
        """
        return None if self._low is None else self._as_qparams(self._low.masked_fill(self._low.isinf(), torch.nan))

    @property
    def maximum(self) -> Tensor | None:
        """Upper end of the range; as ``minimum``."""
        return None if self._high is None else self._as_qparams(self._high.masked_fill(self._high.isinf(), torch.nan))

    @property
    def shape(self) -> tuple[int, ...]:
        """The qparam shape; empty until something was seen."""
        return tuple(self._shape or ())

    @property
    def counts(self) -> Tensor | None:
        """Elements in each bin. Shape: int64 [scales, 2 · bins]."""
        return self._counts

    @property
    def edges(self) -> Tensor | None:
        """Ends of the bins. Shape: float64 [scales, 2 · bins + 1]."""
        if self._first is None or self._exponent is None:
            return None
        place = torch.arange(2 * self.bins + 1, dtype=torch.float64, device=self._first.device)
        return torch.ldexp(self._first.to(torch.float64)[:, None] + place, self._exponent[:, None])

    @torch.no_grad()
    def observe(self, x: Tensor) -> None:
        """Observes one tensor. Raises: CalibrationError if it holds NaN or +inf, or has another number of channels."""
        ahead = self._counted_ahead(x)
        batch = extremes(x, self.granularity, allows_mask=self.allows_mask, finds_mask=self.finds_mask,
                         known=None if ahead is None else ahead.extremes)
        if batch is None:
            return
        if not batch.nothing:
            low, high = batch.low, batch.high
            if batch.seen is not None:
                low, high = low.where(batch.seen, torch.inf), high.where(batch.seen, -torch.inf)
            if self._low is not None:
                same_shape(self._shape or (), low.shape)
            self._shape = low.shape
            self._widen(low.reshape(-1), high.reshape(-1))
            assert self._first is not None
            assert self._exponent is not None
            assert self._counts is not None
            counts = None if ahead is None else ahead.on(self._first, self._exponent, 2 * self.bins)
            if counts is None:
                block_size = self.granularity.block_size(x.ndim)
                inside = self._clamped(x, block_size, low.reshape(-1), high.reshape(-1))
                counts = histogram(inside, self._first, self._exponent, 2 * self.bins, block_size)
            self._counts += counts
        self._add(batch)

    def _counted_ahead(self, x: Tensor) -> _CountedAhead | None:
        """Counts a tensor before its range is known; ``None`` where nothing is gained, as on the first tensor."""
        first, exponent = self._first, self._exponent
        if first is None or exponent is None or len(first) > 1 or self._limits is not None or x.numel() == 0:
            return None
        if not (on_cpu(x) and on_cpu(first) and abs(float(first)) < MOST_AHEAD):
            return None
        counts, low, high = histogram_and_min_max(
            x, first - self.bins, exponent, 3 * self.bins, self.granularity.block_size(x.ndim)
        )
        return _CountedAhead(counts, (low, high), first, exponent, self.bins)

    def merge(self, other: Histogram) -> None:
        """Adds the statistics of ``other``. Raises: CalibrationError if granularity, bins or growth differ."""
        if (other.granularity, other.bins, other.growth) != (self.granularity, self.bins, self.growth):
            raise CalibrationError(
                f"a histogram {other.granularity} of {other.bins} bins and growth {other.growth} cannot join one "
                f"{self.granularity} of {self.bins} bins and growth {self.growth}"
            )
        if other._counts is not None and other._low is not None and other._high is not None:
            assert other._first is not None
            assert other._exponent is not None
            if self._low is not None and self._shape != other._shape:
                same_shape(self._shape or (), other._shape or ())
            self._shape = other._shape
            self._widen(other._low, other._high, other._limits)
            assert self._counts is not None
            self._counts += self._rebinned(other._counts, other._first, other._exponent).to(self._counts.device)
        self._add_all(other)

    def samples(self) -> WeightedSamples:
        """The middles of the bins, clamped to the extremes. Raises: CalibrationError if nothing was seen."""
        edges, counts = self.edges, self._counts
        if edges is None or counts is None or self._low is None or self._high is None:
            raise CalibrationError("no data was observed; calibrate with data that reaches this site")
        unseen = self._low > self._high
        low, high = (bound.to(torch.float64).masked_fill(unseen, torch.nan) for bound in (self._low, self._high))
        middles = (edges[:, :-1] + edges[:, 1:]) / 2
        middles = torch.minimum(torch.maximum(middles, low[:, None]), high[:, None])
        return WeightedSamples(middles, counts, low, high, (edges[:, 1] - edges[:, 0]) / 2, binned=True)

    def _as_qparams(self, bound: Tensor) -> Tensor:
        return bound.reshape(self._shape or ())

    def _widen(self, low: Tensor, high: Tensor, limits: tuple[Tensor, Tensor] | None = None) -> None:
        """Extends the bin grid so that it covers [low, high] clamped to the limits."""
        if self.growth is not None:
            self._limit(low, high, limits)
        if self._low is None or self._high is None:
            self._low, self._high = low, high
        else:
            if self._limits is not None:
                seen = low <= high
                low, high = (self._within_limits(bound).where(seen, bound) for bound in (low, high))
            before = self._low, self._high
            self._low = torch.minimum(self._low.to(low.device), low)
            self._high = torch.maximum(self._high.to(low.device), high)
            if on_cpu(low) and torch.equal(self._low, before[0]) and torch.equal(self._high, before[1]):
                return
        first, exponent = _grid(self._low, self._high, 2 * self.bins)
        if self._counts is None or self._first is None or self._exponent is None:
            self._first, self._exponent = first, exponent
            self._counts = torch.zeros((len(first), 2 * self.bins), dtype=torch.int64, device=first.device)
            return
        if on_cpu(first) and torch.equal(first, self._first) and torch.equal(exponent, self._exponent):
            return
        old = self._counts, self._first, self._exponent
        self._first, self._exponent = first, exponent
        self._counts = self._rebinned(*old)

    def _limit(self, low: Tensor, high: Tensor, limits: tuple[Tensor, Tensor] | None) -> None:
        """Sets the limits of scales that see their first values: ``limits``, or the range extended by ``growth``."""
        assert self.growth is not None
        if limits is None:
            width = torch.where(high > low, high - low, 1.0)
            half_width = torch.where(high > low, 0.0, 0.5)  # a constant counts as a range of width 1 around it
            reach = width * (self.growth / 2) + half_width
            limits = low - reach, high + reach
        if self._limits is None or self._low is None or self._high is None:
            self._limits = torch.full_like(low, -torch.inf), torch.full_like(high, torch.inf)
            fresh = low <= high
        else:
            fresh = (low <= high) & (self._low > self._high).to(low.device)
        lower, upper = (
            new.to(low.device).where(fresh, present.to(low.device))
            for new, present in zip(limits, self._limits, strict=True)
        )
        self._limits = lower, upper

    def _rebinned(self, counts: Tensor, first: Tensor, exponent: Tensor) -> Tensor:
        """Converts counts on another bin grid to this one; values outside it count in the outermost bins.

        With limited growth this grid may be the finer one; then a whole bin is counted at its middle.
        """
        assert self._first is not None
        assert self._exponent is not None
        assert self._high is not None
        device = counts.device
        own_first, own_exponent = self._first.to(device), self._exponent.to(device)
        place = torch.arange(counts.shape[1], dtype=torch.float64, device=device) + first.to(torch.float64)[:, None]
        place = torch.ldexp(place + 0.5, (exponent - own_exponent)[:, None]).floor()  # in bins of this grid
        last = torch.ldexp(self._high.to(device, torch.float64), -own_exponent).floor() - own_first
        last = last.nan_to_num(neginf=0).clamp(0, counts.shape[1] - 1)[:, None]
        slot = torch.minimum((place - own_first[:, None]).clamp(min=0), last)
        return torch.zeros_like(counts).scatter_add_(1, slot.nan_to_num().to(torch.int64), counts)

    def _within_limits(self, value: Tensor) -> Tensor:
        assert self._limits is not None
        lower, upper = (limit.to(value.device) for limit in self._limits)
        return torch.minimum(torch.maximum(value, lower), upper)

    def _clamped(self, x: Tensor, block_size: tuple[int, ...], low: Tensor, high: Tensor) -> Tensor:
        """``x`` clamped to the limits; sentinels become −inf, which no bin counts."""
        if self._limits is None:
            return x
        lower, upper = (limit.to(x.device) for limit in self._limits)
        if on_cpu(x) and not bool(((low < lower) | (high > upper)).any()):
            return x
        split, inside = split_shape(x.shape, block_size)
        scale_shape = [1 if axis in inside else length for axis, length in enumerate(split)]
        wide = x.to(torch.float32).reshape(split)
        clamped = torch.minimum(torch.maximum(wide, lower.reshape(scale_shape)), upper.reshape(scale_shape))
        return clamped.where(wide > sentinel_bound(x.dtype), -torch.inf).reshape(x.shape)


def _grid(low: Tensor, high: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """First bin and exponent of the finest grid on which [low, high] takes at most ``capacity`` bins."""
    lower = torch.where(low <= high, low, 0.0).to(torch.float64)
    upper = torch.where(low <= high, high, 0.0).to(torch.float64)
    exponent = torch.frexp((upper - lower) / (capacity - 1)).exponent.to(torch.int32)
    finer = exponent - 1
    bins = torch.ldexp(upper, -finer).floor() - torch.ldexp(lower, -finer).floor() + 1
    exponent = torch.where((bins <= capacity) | (upper == lower), finer, exponent)
    peak = torch.maximum(lower.abs(), upper.abs())
    digits = torch.frexp(peak).exponent.to(torch.int32) - DIGITS
    finest = torch.where((upper == lower) | (digits > exponent), digits, exponent)
    exponent = torch.where(peak == 0, SMALLEST_EXPONENT, finest).clamp(min=SMALLEST_EXPONENT)
    return torch.ldexp(lower, -exponent).floor().to(torch.float32), exponent
