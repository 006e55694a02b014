"""Running minimum and maximum."""

from __future__ import annotations

import torch
from torch import Tensor

from qtk.core.granularity import Granularity, PerTensor, Shape
from qtk.observers.observer import refuse_broken, sentinel_bound


class MinMax:
    """Smallest and largest value seen by each scale.

    Shape: ``minimum`` and ``maximum`` float32 in the qparam shape, ``None`` until something was seen.
    """

    def __init__(self, granularity: Granularity) -> None:
        self.granularity = granularity
        self.minimum: Tensor | None = None
        self.maximum: Tensor | None = None
        self.count = 0
        self.sentinels = 0

    @torch.no_grad()
    def observe(self, x: Tensor) -> None:
        """Takes one tensor in. Raises: CalibrationError if it holds NaN or +inf, or nothing but mask marks in a slice
        that has its own scale.
        """
        if x.numel() == 0:
            return
        bounds = extremes(x, self.granularity)
        masked = 0
        if not bool((bounds[0] > sentinel_bound(x.dtype)).all()):
            refuse_broken(bounds[1])
            marks = x <= sentinel_bound(x.dtype)
            masked = int(marks.sum())
            self.sentinels += masked
            if masked == x.numel():
                return
            bounds = (extremes(x.masked_fill(marks, float("inf")), self.granularity)[0], bounds[1])
        refuse_broken(bounds[1])
        self.count += x.numel() - masked
        self.take(*bounds)

    def take(self, minimum: Tensor, maximum: Tensor) -> None:
        """Joins the extremes of one more tensor."""
        self.minimum = minimum if self.minimum is None else torch.minimum(self.minimum, minimum)
        self.maximum = maximum if self.maximum is None else torch.maximum(self.maximum, maximum)

    def merge(self, other: MinMax) -> None:
        """Takes in what ``other`` has seen; the result equals having observed both."""
        if other.minimum is not None and other.maximum is not None:
            self.take(other.minimum, other.maximum)
        self.count += other.count
        self.sentinels += other.sentinels


def extremes(x: Tensor, granularity: Granularity) -> tuple[Tensor, Tensor]:
    """Smallest and largest element of each group that shares a scale.

    Shape: float32 in ``granularity.qparam_shape(x.shape)``. NaN wins in both.
    """
    shape = granularity.qparam_shape(tuple(x.shape))
    if isinstance(granularity, PerTensor):
        low, high = torch.aminmax(x)
    else:
        split, within = _split(tuple(x.shape), granularity.block_size(x.ndim))
        blocks = x.reshape(split)
        low, high = blocks.amin(within), blocks.amax(within)
    return low.to(torch.float32).reshape(shape), high.to(torch.float32).reshape(shape)


def _split(shape: Shape, block_size: Shape) -> tuple[list[int], list[int]]:
    """The shape with every axis split into (blocks, inside a block), and the axes inside a block."""
    split: list[int] = []
    within = []
    for length, size in zip(shape, block_size, strict=True):
        inside = length if size == -1 else size
        if inside not in (1, length):
            split += [length // inside, inside]
            within.append(len(split) - 1)
        else:
            split.append(length)
            within += [len(split) - 1] if inside == length and size != 1 else []
    return split, within
