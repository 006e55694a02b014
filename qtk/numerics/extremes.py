"""Smallest and largest elements of tensors, without the sentinels of attention masks, gathered tensor by tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qtk.numerics.statistics import min_max


def add_extremes_(
    x: Tensor, block_size: Sequence[int], bound: float, least: int, low: Tensor, high: Tensor, counts: Tensor
) -> None:
    """As ``qtk.ops.extremes.add_extremes_``."""
    masked = x <= bound
    lowest, _ = min_max(x.masked_fill(masked, torch.inf), block_size)
    _, highest = min_max(x.masked_fill(masked, -torch.inf), block_size)
    sentinels = masked.sum()
    broken = (lowest.isnan() | (highest == torch.inf)).any() | ((sentinels > 0) & (sentinels < least))
    low.copy_(torch.minimum(low, lowest))
    high.copy_(torch.maximum(high, highest))
    counts += torch.stack((x.numel() - sentinels, sentinels, broken.to(torch.int64)))
