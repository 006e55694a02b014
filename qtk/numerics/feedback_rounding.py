"""Rounding with error feedback: the columns of a matrix one after the other, each with the errors of those before it.

    x̂_i = nearest(target_i + Σ_j F_ij d_j)        d_j = start_j - x̂_j

where j are the columns rounded before i, from the first to the last or the other way. GPTQ and coordinate descent round
a weight so.
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
        feedback: F; of row i only what belongs to the columns before i is read.
        nearest: (numbers, index of their column) → the nearest grid points.
        backwards: whether the last column is the first to be rounded.

    Shape: ``target`` and ``change`` [groups, rows, columns]; ``feedback`` [groups, columns, columns]; first argument
    and result of ``nearest`` [groups, rows].

    >>> import torch
    >>> target = torch.tensor([[[0.4, 0.4]]])
    >>> round_with_feedback_(target, target.clone(), torch.ones(1, 2, 2), lambda x, _: x.round(), backwards=False)
    >>> target
    tensor([[[0., 1.]]])
    """
    columns = range(target.shape[2])
    targets, changes = (values.permute(2, 0, 1).contiguous() for values in (target, change))
    by_group = changes.transpose(0, 1)
    for column in reversed(columns) if backwards else columns:
        before = slice(column + 1, None) if backwards else slice(column)
        here = targets[column]
        here[:, None].baddbmm_(feedback[:, column, None, before], by_group[:, before])
        here.copy_(nearest(here, column))
        changes[column].sub_(here)
    target.copy_(targets.permute(1, 2, 0))
    change.copy_(changes.permute(1, 2, 0))
