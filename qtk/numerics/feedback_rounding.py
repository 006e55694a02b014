"""Rounding with error feedback: the rows of a matrix one after the other, each with the errors of those before it.

    x̂_i = nearest(target_i + Σ_j F_ij d_j)        d_j = start_j - x̂_j

where j are the rows rounded before i, from the first to the last or the other way. GPTQ and coordinate descent round
the columns of a weight so.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def round_with_feedback_(
    target: Tensor, change: Tensor, feedback: Tensor, nearest: Callable[[Tensor, int], Tensor], *, backwards: bool
) -> None:
    """Rounds ``target`` in place.

    Args:
        target: becomes x̂.
        change: start; becomes start - x̂.
        feedback: F; of each row only what belongs to the rows before it is read.
        nearest: (numbers, index of their row) → the nearest grid points.
        backwards: whether the last row is the first to be rounded.

    Shape: ``target`` and ``change`` [rows, groups, columns]; ``feedback`` [groups, rows, rows].

    >>> import torch
    >>> target = torch.tensor([0.4, 0.4]).reshape(2, 1, 1)
    >>> round_with_feedback_(target, target.clone(), torch.ones(1, 2, 2), lambda x, row: x.round(), backwards=False)
    >>> target.flatten()
    tensor([0., 1.])
    """
    rows = range(len(target))
    targets, changes, by_group = target.unbind(), change.unbind(), change.transpose(0, 1)
    for row in reversed(rows) if backwards else rows:
        before = slice(row + 1, None) if backwards else slice(row)
        targets[row][:, None].baddbmm_(feedback[:, row, None, before], by_group[:, before])
        targets[row].copy_(nearest(targets[row], row))
        changes[row].sub_(targets[row])
