"""The statistics of all rows, in place of the statistics of matrices and layers that too few rows meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from qtk.moments.second_moments import SecondMoments


def pooled(moments: SecondMoments, matrices: Sequence[int]) -> SecondMoments:
    """The statistics of a stack, in which some matrices have the statistics of all rows, weighed as their own rows.

    A matrix that no row meets counts as if one did.
    """
    counts = moments.counts
    if counts is None or not matrices:
        return moments
    index, total = list(matrices), sum(counts)
    sums = {name: each.clone() for name, each in moments.sums.items()}
    sums["support"] = sums.get("support", sums["counts"]).clone()
    own = sums["counts"][index].clamp(min=1)
    for name, each in moments.sums.items():
        sums[name][index] = each.sum(0) * (own / total).reshape(-1, *(1 for _ in each.shape[1:]))
    sums["counts"][index], sums["support"][index] = own, float(total)
    return _of_sums(moments, moments.rows, sums, lambda held_out: pooled(held_out, matrices))


def pooled_layer(rows: int, total: SecondMoments) -> SecondMoments:
    """The statistics of the rows of several layers, for one of them, weighed as its own ``rows``, at least one."""
    own = max(rows, 1)
    sums = {name: each * (own / total.rows) for name, each in total.sums.items()}
    one = sums["sum"].new_ones(1)
    return _of_sums(total, own, {**sums, "counts": one * own, "support": one * total.rows},
                    lambda held_out: pooled_layer(own * held_out.rows // total.rows, held_out))


def _of_sums(
    moments: SecondMoments, rows: int, sums: Mapping[str, Tensor], of_held_out: Callable[[SecondMoments], SecondMoments]
) -> SecondMoments:
    result = SecondMoments.of_sums(moments.geometry, moments.required, rows, sums, moments.row_sample)
    if moments.held_out is not None and moments.held_out.rows:
        result.held_out = of_held_out(moments.held_out)
    return result
