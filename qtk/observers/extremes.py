"""Smallest and largest measurement of one tensor, mask marks left out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qtk.core.granularity import Granularity
from qtk.errors import CalibrationError
from qtk.ops.statistics import min_max

SENTINEL = -1e30
"""Values down here (−inf, finfo.min) mark masked places; they are no measurement."""


@dataclass(frozen=True, slots=True)
class Extremes:
    """What one tensor adds to the statistics of each scale.

    ``count`` elements were measured, ``sentinels`` left out. Where ``seen`` is false a scale's elements were all left
    out, and its ``low`` and ``high`` mean nothing; ``seen`` is ``None`` if that happened nowhere.

    Shape: ``low``, ``high`` float32, ``seen`` bool, in the qparam shape.
    """

    low: Tensor
    high: Tensor
    count: int
    sentinels: int
    seen: Tensor | None = None


def sentinel_bound(dtype: torch.dtype) -> float:
    """Values ≤ this are sentinels; in float16 that is its own smallest number.

    >>> sentinel_bound(torch.float32), sentinel_bound(torch.float16)
    (-1e+30, -65504.0)
    """
    return max(SENTINEL, torch.finfo(dtype).min)


def extremes(x: Tensor, granularity: Granularity) -> Extremes | None:
    """The extremes of ``x`` for each scale, ``None`` if it is empty.

    Raises: CalibrationError if ``x`` holds NaN or +inf; SpecError if the granularity does not fit it.
    """
    if x.numel() == 0:
        return None
    bound = sentinel_bound(x.dtype)
    low, high = _reduce(x, granularity)
    if bool(((low > bound) & (high < torch.inf)).all()):  # false at NaN too
        return Extremes(low, high, x.numel(), 0)
    counts = {"NaN": int(x.isnan().sum()), "+inf": int(x.isposinf().sum())}
    broken = [f"{count} {kind}" for kind, count in counts.items() if count]
    if broken:
        raise CalibrationError(
            f"{' and '.join(broken)} among the {x.numel()} elements of a {x.dtype} tensor of shape {tuple(x.shape)}; "
            "clean the data, or find the layer that produces them"
        )
    marks = x <= bound
    low, _ = _reduce(x.masked_fill(marks, torch.inf), granularity)
    sentinels = int(marks.sum())
    seen = low < torch.inf
    return Extremes(low, high, x.numel() - sentinels, sentinels, None if bool(seen.all()) else seen)


def _reduce(x: Tensor, granularity: Granularity) -> tuple[Tensor, Tensor]:
    """Minimum and maximum, float32 in the qparam shape; NaN wins in both."""
    shape = granularity.qparam_shape(tuple(x.shape))
    low, high = min_max(x, granularity.block_size(x.ndim))
    return low.reshape(shape), high.reshape(shape)
