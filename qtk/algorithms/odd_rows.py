"""Finds the rows of a table of statistics that are unlike the others."""

from __future__ import annotations

import torch
from torch import Tensor

LIMIT, LARGEST = 6.0, 50.0
"""Robust standard deviations from which a row is odd, and the most that one statistic counts for."""

NORMAL = 1.4826
"""Standard deviation of normal values over their median absolute deviation."""

LEAST = 4
"""Rows below which none can be told from the others."""


def odd_rows(table_RF: Tensor) -> tuple[Tensor, Tensor]:
    """Says how far each row is from the median row, and the statistic in which it is farthest.

    Of each statistic the distance to the median counts in units of the median absolute deviation over all rows; a
    row's score is the root mean square over statistics, of which NaN (unknown) counts as 0.

    Shape: ``table_RF`` [rows, statistics]; results [rows].

    >>> rows = torch.randn(16, 40, generator=torch.Generator().manual_seed(0))
    >>> rows[5] += 12
    >>> scores, _ = odd_rows(rows)
    >>> (scores > LIMIT).nonzero().flatten().tolist()
    [5]
    """
    table = table_RF.double()
    distance = (table - table.nanmedian(0).values).abs()
    spread = NORMAL * distance.nanmedian(0).values
    floor = 1e-3 * table.abs().nanmedian(0).values + torch.finfo(torch.float32).tiny
    scaled = (distance / torch.maximum(spread, floor)).nan_to_num(0.0, LARGEST).clamp(max=LARGEST)
    return scaled.square().mean(1).sqrt(), scaled.argmax(1)
