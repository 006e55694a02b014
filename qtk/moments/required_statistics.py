"""Which statistics of a layer's input a layer-wise method needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qtk.moments.holdout import Holdout


@dataclass(frozen=True, slots=True)
class RequiredStatistics:
    """Which statistics of a layer's input to collect.

    Args:
        block: columns of X whose products are summed, a divisor of all: the diagonal blocks of the matrices. ``None``:
            all columns.
        difference: whether to sum D.
        sample_rows: rows of X̂ and X to keep as they are, at most.
        gram: whether to sum H and E; without them only means.
        dtype: in which the products of one batch are formed.
        holdout: the samples whose statistics are summed apart from the others; ``None``: none.
        is_added_up: whether they are added to other layers' statistics, so that they may not depend on the weight.
    """

    block: int | None = None
    difference: bool = False
    sample_rows: int = 0
    gram: bool = True
    dtype: torch.dtype = torch.float32
    holdout: Holdout | None = None
    is_added_up: bool = False

    @staticmethod
    def union(each: Sequence[RequiredStatistics]) -> RequiredStatistics:
        """Statistics that are enough for all of ``each``: over all columns if the blocks differ.

        >>> both = RequiredStatistics.union([RequiredStatistics(4, gram=False), RequiredStatistics(4, sample_rows=9)])
        >>> both == RequiredStatistics(4, sample_rows=9)
        True
        """
        blocks = {required.block for required in each}
        return RequiredStatistics(
            blocks.pop() if len(blocks) == 1 else None, difference=any(required.difference for required in each),
            sample_rows=max(required.sample_rows for required in each), gram=any(required.gram for required in each),
        )
