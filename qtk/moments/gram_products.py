"""Sums of products over batches, of which symmetric ones are computed by half."""

from __future__ import annotations

from torch import Tensor

PANEL = 256
"""Columns of a Gram matrix computed together; blocks below the diagonal are copied from above it."""


class GramProducts:
    """A sum of products of a few batches; symmetric ones are computed only on and above the diagonal panels.

    Args:
        left: the first left factor.
        right: the first right one, ``None`` for ``left``.
        groups: how many there are in all.

    Shape: factors [groups, blocks, rows, left or right]; ``total`` [groups, blocks, left, right].
    """

    def __init__(self, left: Tensor, right: Tensor | None, groups: int) -> None:
        width = (left if right is None else right).shape[-1]
        self.total = left.new_zeros(groups, left.shape[1], left.shape[-1], width)
        self.batches = 0

    def add(self, left: Tensor, right: Tensor | None, first: int = 0) -> None:
        """Adds ``leftᵀ right``, or ``leftᵀ left``, of the groups from ``first`` on."""
        total, left = self.total[first:first + len(left)].flatten(0, 1), left.flatten(0, 1)
        if right is not None:
            total.baddbmm_(left.mT, right.flatten(0, 1))
            return
        for begin in range(0, left.shape[-1], PANEL):
            end = begin + PANEL
            total[:, begin:end, begin:].baddbmm_(left[..., begin:end].mT, left[..., begin:])


def mirrored(upper: Tensor) -> Tensor:
    """Copies the panels above the diagonal to below it. Changes ``upper``."""
    for begin in range(PANEL, upper.shape[-1], PANEL):
        upper[..., begin : begin + PANEL, :begin] = upper[..., :begin, begin : begin + PANEL].mT
    return upper
