"""Extremes and histograms of the elements that share a scale: what range calibration starts from."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from qtk.numerics.blocks import flat, split_shape


def min_max(x: Tensor, block_size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Smallest and largest element of each scale; NaN in both where there is a NaN.

    Shape: ``x`` any, not empty; results float32, one axis, the scales in their order.

    >>> min_max(torch.tensor([[1.0, 2.0], [-3.0, 0.5]]), (1, -1))
    (tensor([ 1., -3.]), tensor([2.0000, 0.5000]))
    """
    if not block_size:
        elements = flat(x)  # aminmax of anything but a contiguous tensor takes 10 to 100 times as long
        low, high = torch.aminmax(x if elements is None else elements)
    else:
        split, inside = split_shape(x.shape, block_size)
        blocks = x.view(split)
        low, high = (blocks.amin(inside), blocks.amax(inside)) if inside else (blocks, blocks)
    return low.to(torch.float32, copy=True).reshape(-1), high.to(torch.float32, copy=True).reshape(-1)


def histogram(x: Tensor, low: Tensor, width: Tensor, bins: int, block_size: Sequence[int]) -> Tensor:
    """How many elements of each scale lie in each of ``bins`` bins of equal ``width`` from ``low`` on.

    Bin ``floor((x - low) / width)``, in float32; what lies on the upper edge of the last bin is in it, what lies
    outside (NaN too) in none.

    Shape: ``x`` any; ``low`` and ``width`` float32 [scales]; result int64 [scales, bins].

    >>> histogram(torch.tensor([0.0, 0.9, 1.0, 2.0, 2.1]), torch.zeros(1), torch.ones(1), 2, ())
    tensor([[2, 2]])
    """
    scales = low.numel()
    split, inside = split_shape(x.shape, block_size)
    lined = [1 if axis in inside else length for axis, length in enumerate(split)]
    place = (x.detach().to(torch.float32).reshape(split) - low.reshape(lined)) / width.reshape(lined)
    counted = (place >= 0) & (place <= bins)
    slot = place.where(counted, 0.0).long().clamp_(max=bins - 1)
    owner = torch.arange(scales, device=x.device).reshape(lined)
    found = torch.where(counted, owner * bins + slot, scales * bins).reshape(-1)
    return torch.bincount(found, minlength=scales * bins + 1)[:-1].reshape(scales, bins)


def count_scales(shape: Sequence[int], block_size: Sequence[int]) -> int:
    """How many scales a tensor of ``shape`` has.

    >>> count_scales((8, 128), (1, 32))
    32
    """
    split, inside = split_shape(shape, block_size)
    return math.prod(length for axis, length in enumerate(split) if axis not in inside)
