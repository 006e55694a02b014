"""The histogram of AIMET's C++ library: its bins are fixed by the first batch, and every batch has the same weight."""

from __future__ import annotations

import torch
from torch import Tensor

from qtk.core.granularity import Granularity
from qtk.errors import CalibrationError
from qtk.numerics.blocks import split_shape
from qtk.numerics.statistics import summed_at
from qtk.observers.extremes import Counted, extremes, on_cpu
from qtk.observers.min_max import same_shape

BINS = 512
GROWTH = 3.0
CHUNK = 1 << 22
"""Elements counted at once."""


class FirstBatchHistogram(Counted):
    """512 bins over three times the range of the first batch that is not all zero; values outside are dropped.

    An element is in the bin ``round(x / width - first / width)``, ties away from zero. Each batch adds its shares, and
    the shares are the mean over batches.
    """

    def __init__(self, granularity: Granularity) -> None:
        super().__init__()
        self.granularity = granularity
        self.shape: tuple[int, ...] = ()
        self._first: Tensor | None = None  # float64 [scales]; left end of the first bin
        self._width: Tensor | None = None
        self._shares: Tensor | None = None  # float64 [scales, BINS], summed over batches
        self._batches: int | Tensor = 0  # a tensor on an accelerator
        self._started: Tensor | None = None  # bool []: the bins are fixed
        self.device = torch.device("cpu")  # of the observed tensors
        self._seen: Tensor | None = None  # bool [scales]: saw anything but sentinels

    @torch.no_grad()
    def observe(self, x: Tensor) -> None:
        """Observes one tensor. Raises: CalibrationError if it holds NaN or +inf, or has another number of channels."""
        batch = extremes(x, self.granularity, allows_mask=self.allows_mask, finds_mask=self.finds_mask)
        if batch is None:
            return
        if batch.nothing:
            self._add(batch)
            return
        if self._seen is not None:
            same_shape(self.shape, batch.low.shape)
        self.shape, self.device = tuple(batch.low.shape), x.device
        seen = torch.ones_like(batch.low, dtype=torch.bool) if batch.seen is None else batch.seen
        self._seen = seen.reshape(-1) if self._seen is None else self._seen | seen.reshape(-1)
        low, high = (bound.reshape(-1).to(torch.float64) for bound in (batch.low, batch.high))
        self._add(batch)
        starts = ((low != 0) | (high != 0)).any()
        if on_cpu(x) and self._width is None and not bool(starts):
            return
        if self._width is None or not on_cpu(x):  # on an accelerator nobody waits to know whether they are fixed
            self._fix_bins(low, high, starts)
        assert self._started is not None
        self._batches = self._batches + (1 if on_cpu(x) else self._started.to(torch.int64))
        split, inside = split_shape(x.shape, self.granularity.block_size(x.ndim))
        outside = [axis for axis in range(len(split)) if axis not in inside]
        self._bin(x.detach().reshape(split).permute(*outside, *inside).reshape(len(low), -1))

    def _fix_bins(self, low: Tensor, high: Tensor, starts: Tensor) -> None:
        """Sets the bins, if they are not fixed yet."""
        low, high = torch.where(low == high, low - 0.5, low), torch.where(low == high, high + 0.5, high)
        middle = (low + high) / 2
        first = middle - GROWTH * (middle - low)
        width = (middle + GROWTH * (high - middle) - first) / BINS
        if self._first is None or self._width is None or self._started is None:
            self._first, self._width, self._started = first, width, starts
            self._shares = torch.zeros((len(low), BINS), dtype=torch.float64, device=low.device)
            return
        self._first, self._width = self._first.where(self._started, first), self._width.where(self._started, width)
        self._started = self._started | starts

    def merge(self, other: FirstBatchHistogram) -> None:
        """Adds the statistics of ``other``.

        Raises: CalibrationError if their granularities differ, or both have seen values.
        """
        if other.granularity != self.granularity:
            raise CalibrationError(f"statistics {other.granularity} cannot join statistics {self.granularity}")
        if self.count and other.count:
            raise CalibrationError("tf_enhanced(variant='v1') takes its bins from the first batch, so that two runs "
                                   "cannot join; calibrate in one process, or with variant='v2'")
        if other.count:
            self.shape, self.device, self._batches = other.shape, other.device, other._batches
            for name in ("_first", "_width", "_shares", "_seen", "_started"):
                value = getattr(other, name)
                setattr(self, name, None if value is None else value.clone())
        self._add_all(other)

    def shares(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Left ends of the bins and shares, float64 [scales, BINS], and which scales saw anything, bool [scales].

        ``None`` if only zeros were seen.
        """
        if self._first is None or self._width is None or self._shares is None or self._seen is None:
            return None
        if not int(self._batches):
            return None
        left = self._first[:, None] + self._width[:, None] * torch.arange(BINS, device=self._first.device)
        return left, self._shares / self._batches, self._seen

    @property
    def dropped(self) -> float:
        """The largest share of a scale's values outside its bins, 0…1."""
        if self._shares is None:
            return 0.0
        return max(0.0, 1.0 - float(self._shares.sum(1).min()) / int(self._batches))

    def _bin(self, rows: Tensor) -> None:
        assert self._first is not None
        assert self._width is not None
        assert self._shares is not None
        assert self._started is not None
        for columns in torch.split(rows, max(1, CHUNK // len(rows)), dim=1):
            position = columns.to(torch.float64) / self._width[:, None] - (self._first / self._width)[:, None]
            slot = (position.abs() + 0.5).floor() * position.sign()
            inside = (slot >= 0) & (slot < BINS)
            row_start = torch.arange(len(rows), device=rows.device)[:, None] * BINS
            flat_slot = torch.where(inside, row_start + slot.where(inside, 0.0).long(), len(rows) * BINS)
            counts = summed_at(flat_slot.reshape(-1), None, len(rows) * BINS + 1)[:-1].reshape(len(rows), BINS)
            self._shares += torch.where(self._started, counts / rows.shape[1], 0.0)
