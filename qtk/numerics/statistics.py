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
    x = x.detach()
    if not block_size:
        elements = flat(x)  # aminmax of anything but a contiguous tensor takes 10 to 100 times as long
        low, high = torch.aminmax(x if elements is None else elements)
    else:
        split, inside = split_shape(x.shape, block_size)
        blocks = x.view(split)
        low, high = (blocks.amin(inside), blocks.amax(inside)) if inside else (blocks, blocks)
    return low.to(torch.float32, copy=True).reshape(-1), high.to(torch.float32, copy=True).reshape(-1)


def histogram(x: Tensor, first: Tensor, exponent: Tensor, bins: int, block_size: Sequence[int]) -> Tensor:
    """How many elements of each scale lie in each of ``bins`` bins whose width is a power of two.

    ``x`` is in bin ``floor(x / 2^exponent) - first``, which float32 computes exactly; what is in no bin, and NaN, is
    not counted. Bins that start at an even multiple of the width form, with the next, a bin of twice the width.

    Shape: ``x`` any; ``first`` float32, whole numbers, and ``exponent`` int32, -126 to 126: [scales]; result int64
    [scales, bins].

    >>> histogram(torch.tensor([0.0, 0.9, 1.0, 2.0]), torch.zeros(1), torch.zeros(1, dtype=torch.int32), 2, ())
    tensor([[2, 1]])
    """
    scales = first.numel()
    place = _places(x, first, exponent, bins, block_size)
    return summed_at(place, None, scales * bins + 1)[:-1].reshape(scales, bins)


def histogram_of_squares(
    x: Tensor, factors: Tensor, first: Tensor, exponent: Tensor, bins: int, block_size: Sequence[int]
) -> Tensor:
    """The sum of the squares of ``factors`` over the elements of ``x`` in each bin; bins as in ``histogram``.

    Squares that are not finite count 0.

    Shape: ``x`` any, ``factors`` the same; ``first``, ``exponent`` as for ``histogram``; result float64 [scales, bins].

    >>> x, first, exponent = torch.tensor([0.0, 0.9, 1.0, 2.0]), torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    >>> histogram_of_squares(x, torch.tensor([1.0, 2.0, 3.0, 4.0]), first, exponent, 2, ())
    tensor([[5., 9.]], dtype=torch.float64)
    """
    scales = first.numel()
    place = _places(x, first, exponent, bins, block_size)
    squares = factors.detach().to(torch.float32).to(torch.float64).square()
    squares = squares.where(squares.isfinite(), 0.0).reshape(split_shape(x.shape, block_size)[0]).reshape(-1)
    sums = summed_at(place, squares, scales * bins + 1)[:-1].reshape(scales, bins)
    return sums.to(torch.float64)  # sums of an empty tensor are integers


def summed_at(places: Tensor, weights: Tensor | None, length: int) -> Tensor:
    """``bincount`` of ``length`` places; on an accelerator without its look at the largest place, which waits.

    Shape: ``places`` int64 and ``weights`` float64, one axis; result [length], int64 or float64.

    >>> summed_at(torch.tensor([0, 2, 2]), None, 4)
    tensor([1, 0, 2, 0])
    """
    if places.device.type == "cpu":
        return torch.bincount(places, weights, minlength=length)
    weights = torch.ones_like(places) if weights is None else weights
    return weights.new_zeros(length).scatter_add_(0, places, weights)


def _places(x: Tensor, first: Tensor, exponent: Tensor, bins: int, block_size: Sequence[int]) -> Tensor:
    """The place of each element in the flattened [scales, bins], behind the last if it is in no bin. Shape: flat."""
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
    return torch.where(is_counted, flat_bin, scales * bins).reshape(-1)


def count_scales(shape: Sequence[int], block_size: Sequence[int]) -> int:
    """How many scales a tensor of ``shape`` has.

    >>> count_scales((8, 128), (1, 32))
    32
    """
    split, inside = split_shape(shape, block_size)
    return math.prod([length for axis, length in enumerate(split) if axis not in inside])
