"""Minimum, maximum and histogram of the elements that share a scale, for calibration."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from qtk.numerics.blocks import flat, split_shape


def min_max(x: Tensor, block_size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Minimum and maximum of the elements of each scale; NaN in both where there is a NaN.

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


def histogram(
    x: Tensor, first: Tensor, exponent: Tensor, bins: int, block_size: Sequence[int], weights: Tensor | None = None
) -> Tensor:
    """How many elements of each scale lie in each of ``bins`` bins whose width is a power of two; or their weights.

    ``x`` is in bin ``floor(x / 2^exponent) - first``, which float32 computes exactly; what is in no bin, and NaN, is
    not counted. Bins that start at an even multiple of the width form, with the next, a bin of twice the width.

    Shape: ``x`` any, ``weights`` the same; ``first`` float32, whole numbers, and ``exponent`` int32, -126 to 126:
    [scales]; result int64 [scales, bins], with weights float64.

    >>> x, first, exponent = torch.tensor([0.0, 0.9, 1.0, 2.0]), torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    >>> histogram(x, first, exponent, 2, ())
    tensor([[2, 1]])
    >>> histogram(x, first, exponent, 2, (), torch.tensor([0.5, 1.0, 2.0, 3.0]))
    tensor([[1.5000, 2.0000]], dtype=torch.float64)
    """
    scales = first.numel()
    split, inside = split_shape(x.shape, block_size)
    lined = [1 if axis in inside else length for axis, length in enumerate(split)]
    wide = x.detach().to(torch.float32).reshape(split)
    bin_number = (wide * torch.ldexp(torch.ones_like(first), -exponent).reshape(lined)).floor()
    bin_number = torch.where(wide < 0, bin_number.clamp(max=-1.0), bin_number)  # just below 0 may be rounded to 0
    slot = bin_number - first.reshape(lined)
    is_counted = (slot >= 0) & (slot < bins)
    scale_index = torch.arange(scales, device=x.device).reshape(lined)
    flat_bin = scale_index * bins + slot.where(is_counted, 0.0).long()
    flat_bin = torch.where(is_counted, flat_bin, scales * bins).reshape(-1)
    flat_weights = None if weights is None else weights.detach().to(torch.float64).reshape(-1)
    return torch.bincount(flat_bin, flat_weights, minlength=scales * bins + 1)[:-1].reshape(scales, bins)


def count_scales(shape: Sequence[int], block_size: Sequence[int]) -> int:
    """How many scales a tensor of ``shape`` has.

    >>> count_scales((8, 128), (1, 32))
    32
    """
    split, inside = split_shape(shape, block_size)
    return math.prod([length for axis, length in enumerate(split) if axis not in inside])
