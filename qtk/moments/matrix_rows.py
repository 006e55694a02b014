"""The rows of an input that meet each matrix of a stack."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qtk.moments.holdout import Holdout


@dataclass(frozen=True, slots=True, eq=False)
class MatrixRows:
    """Rows in the order of the matrices that they meet.

    Args:
        rows: the rows of the first matrix, then the rows of the second, and so on.
        counts: how many rows each matrix has.
        owner: the matrix of each row, in the order in which the op reads them.

    Shape: ``rows`` [rows, columns]; ``owner`` int64 [rows].

    >>> x = torch.tensor([[1.0], [2.0], [3.0]])
    >>> found = MatrixRows.of(x, torch.tensor([2, 0, 2]), 3)
    >>> found.counts, [rows.flatten().tolist() for rows in found]
    ((1, 0, 2), [[2.0], [], [1.0, 3.0]])
    """

    rows: Tensor
    counts: tuple[int, ...]
    owner: Tensor

    @classmethod
    def of(cls, rows: Tensor, owner: Tensor, matrices: int) -> MatrixRows:
        """Rows in any order. Shape: ``rows`` [rows, columns], ``owner`` int64 [rows]."""
        counts = tuple(torch.bincount(owner, minlength=matrices).tolist())
        return cls(rows[owner.argsort(stable=True)], counts, owner)

    @classmethod
    def joined(cls, parts: Sequence[MatrixRows]) -> MatrixRows:
        """The rows of several calls."""
        first, *others = parts
        if not others:
            return first
        owner = torch.cat([part.owner for part in parts])
        in_order = torch.cat([part.rows for part in parts])
        sorted_owner = torch.cat([part.owner.sort(stable=True).values for part in parts])
        found = cls.of(in_order, sorted_owner, len(first.counts))
        return cls(found.rows, found.counts, owner)

    def __iter__(self) -> Iterator[Tensor]:
        """The rows of each matrix."""
        return iter(torch.split(self.rows, list(self.counts)))

    def meets_as(self, other: MatrixRows) -> bool:
        """Says whether row by row the same matrices are met, so that the rows of both are pairs."""
        return torch.equal(self.owner, other.owner)

    def split(self, holdout: Holdout, batch: int) -> tuple[MatrixRows, MatrixRows]:
        """The rows that are kept, and the rows held out: the last of each matrix."""
        parts = [(rows[:kept], rows[kept:]) for rows in self
                 for kept in [holdout.kept(len(rows), batch) if len(rows) else 0]]
        kept, held_out = (self._of_parts([part[index] for part in parts]) for index in (0, 1))
        return kept, held_out

    def _of_parts(self, parts: Sequence[Tensor]) -> MatrixRows:
        counts = tuple(len(part) for part in parts)
        owner = torch.arange(len(parts), device=self.rows.device).repeat_interleave(
            torch.tensor(counts, device=self.rows.device))
        return MatrixRows(torch.cat(list(parts)), counts, owner)
