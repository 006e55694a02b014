"""A pass of coordinate descent on the rounding: the columns of a weight one after the other.

With ``d = w - ŵ`` and the half gradient ``g = linear + H d`` of the output's error, weight i moves to

    ŵ_i = nearest(ŵ_i + s_i g_i)        g += H_i (change of d_i)

where s_i is 1 / H_ii or a little less.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

COLUMNS_AT_ONCE = 128
"""Columns whose moves are propagated to the rest together; does not change the result."""


def descend_(
    rounded: Tensor, change: Tensor, half_gradient: Tensor, gram: Tensor, step: Tensor,
    round_with_feedback: Callable[[slice, Tensor, Tensor, Tensor], None],
) -> None:
    """Moves every weight once, in place.

    Args:
        rounded: ŵ.
        change: d.
        half_gradient: g.
        gram: H.
        step: s.
        round_with_feedback: rounds the weights of some columns as ``qtk.numerics.feedback_rounding``, given the
            columns and its first three arguments.

    Shape: ``rounded``, ``change`` and ``half_gradient`` [groups, outputs, columns]; ``gram`` [groups, columns,
    columns]; ``step`` [groups, columns].
    """
    for begin in range(0, gram.shape[-1], COLUMNS_AT_ONCE):
        columns = slice(begin, begin + COLUMNS_AT_ONCE)
        here = rounded[..., columns]
        moves = here.clone()  # becomes the change
        here.addcmul_(half_gradient[..., columns], step[:, None, columns])
        round_with_feedback(columns, here, moves, gram[:, columns, columns] * step[:, columns, None])
        change[..., columns] += moves
        half_gradient.baddbmm_(moves, gram[:, columns])
