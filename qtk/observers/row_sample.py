"""An evenly spaced sample of the rows of a stream of matrices."""

from __future__ import annotations

import copy

import torch
from torch import Tensor


class RowSample:
    """Keeps every n-th row, at most ``size`` rows; n doubles when there are more.

    Args:
        size: largest number of rows.

    >>> sample = RowSample(4)
    >>> sample.add(torch.arange(10.0)[None, :, None])
    >>> sample.rows[0, :, 0]
    tensor([0., 4., 8.])
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.seen = 0
        self._every = 1
        self._kept: list[Tensor] = []

    @property
    def rows(self) -> Tensor:
        """Shape: [groups, rows, columns]."""
        return torch.cat(self._kept, 1)

    def add(self, rows: Tensor) -> None:
        """Shape: [groups, rows, columns]."""
        first = -self.seen % self._every
        self.seen += rows.shape[1]
        self._kept.append(rows[:, first :: self._every].clone())
        while sum(kept.shape[1] for kept in self._kept) > self.size:
            self._kept = [self.rows[:, ::2].clone()]
            self._every *= 2

    def moved(self, device: torch.device) -> RowSample:
        """A copy on a device."""
        moved = copy.copy(self)
        moved._kept = [kept.to(device, copy=True) for kept in self._kept]
        return moved

    def merge(self, other: RowSample) -> None:
        """Appends the rows of ``other`` and thins both until they fit."""
        rows = torch.cat([self.rows, other.rows.to(self.rows.device)], 1)
        self.seen += other.seen
        while rows.shape[1] > self.size:
            rows, self._every = rows[:, ::2], 2 * self._every
        self._kept = [rows.clone()]
