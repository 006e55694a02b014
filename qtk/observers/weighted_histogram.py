"""A histogram whose values have weights: how much an error of each of them counts."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from qtk.observers.histogram import Histogram
from qtk.observers.weighted_samples import WeightedSamples
from qtk.ops.statistics import histogram_of_squares

UNIFORM = 0.05
"""Share of the weights that is spread evenly: an error counts even where no gradient was seen, as beyond the reach of a
saturated function, for a derivative says nothing of a step as long as the range (D-calibration-5)."""


class WeightedHistogram(Histogram):
    """A ``Histogram`` that sums a weight for each value, the square of a factor, beside the counts.

    >>> from qtk.core.granularity import PerTensor
    >>> observer = WeightedHistogram(PerTensor(), bins=2)
    >>> x = torch.tensor([0.0, 1.0, 1.5, 3.0])
    >>> observer.observe(x)
    >>> observer.weigh(x, torch.tensor([2.0, 1.0, 3.0, 1.0]))
    >>> observer.weights
    tensor([[ 4., 10.,  0.,  1.]], dtype=torch.float64)
    """

    _weights: Tensor | None = None  # float64, as the counts

    @property
    def weights(self) -> Tensor | None:
        """Sum of the weights in each bin. Shape: float64 [scales, 2 · bins]."""
        return self._weights

    @torch.no_grad()
    def weigh(self, x: Tensor, factors: Tensor) -> None:
        """Adds the squares of ``factors`` to the weights of the elements of a tensor that has been observed.

        Squares that are not finite, as of a derivative where there is none, count 0.

        Shape: ``x`` any, ``factors`` the same.
        """
        if self._first is None or self._exponent is None or self._weights is None:
            return
        block_size = self.granularity.block_size(x.ndim)
        self._weights += histogram_of_squares(x, factors, self._first, self._exponent, 2 * self.bins, block_size)

    def merge(self, other: Histogram) -> None:
        """Adds the statistics of ``other``. Raises: CalibrationError if granularity, bins or growth differ."""
        super().merge(other)
        if isinstance(other, WeightedHistogram) and other._weights is not None:
            assert self._weights is not None
            assert other._first is not None
            assert other._exponent is not None
            self._weights += self._rebinned(other._weights, other._first, other._exponent).to(self._weights.device)

    def samples(self) -> WeightedSamples:
        """The middles of the bins with their weights, ``UNIFORM`` of which are spread evenly over the elements.

        Raises: CalibrationError if nothing was seen.
        """
        plain = super().samples()
        assert plain.counts is not None
        assert self._weights is not None
        counts = plain.counts.to(torch.float64)
        mean = self._weights.sum(1, keepdim=True) / counts.sum(1, keepdim=True).clamp(min=1)
        weights = (1 - UNIFORM) * self._weights + UNIFORM * mean * counts
        return replace(plain, counts=torch.where(mean > 0, weights / mean.where(mean > 0, 1.0), counts))

    def _widen(self, low: Tensor, high: Tensor, limits: tuple[Tensor, Tensor] | None = None) -> None:
        first, exponent = self._first, self._exponent
        super()._widen(low, high, limits)
        assert self._counts is not None
        if self._weights is None or first is None or exponent is None:
            self._weights = torch.zeros_like(self._counts, dtype=torch.float64)
        elif self._first is not first:
            self._weights = self._rebinned(self._weights, first, exponent)
