"""Gram matrices with their columns in another order."""

from __future__ import annotations

import torch
from torch import Tensor


class OrderedGram:
    """Makes copies of one Gram matrix with its columns in another order, from a copy that it keeps until ``clear``.

    From one copy to the next the diagonal of the Gram matrix may change, as a prior changes it, and nothing else. The
    next copy overwrites the last: fresh memory of this size takes longer to get than to fill.
    """

    def __init__(self) -> None:
        self._kept: tuple[Tensor, Tensor, Tensor] | None = None

    def copy(self, gram: Tensor, order: Tensor) -> Tensor:
        """Shape: ``gram`` and result [groups, columns, columns]; ``order`` int64 [groups, columns]."""
        if self._kept is None or not torch.equal(self._kept[0], order):
            ordered = in_order(gram, order)
            self._kept = order, ordered, torch.empty_like(ordered)
        _, ordered, result = self._kept
        result.copy_(ordered).diagonal(dim1=-2, dim2=-1).copy_(gram.diagonal(dim1=-2, dim2=-1).gather(1, order))
        return result

    def clear(self) -> None:
        """Forgets both copies."""
        self._kept = None


def in_order(matrix: Tensor, order: Tensor) -> Tensor:
    """A copy with its rows and columns in another order. Shape: as of ``OrderedGram.copy``."""
    result = torch.empty_like(matrix, memory_format=torch.contiguous_format)
    for into, each, columns in zip(result, matrix, order, strict=True):
        torch.index_select(each.index_select(0, columns), 1, columns, out=into)
    return result
