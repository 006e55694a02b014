"""``qtk::min_max``, ``qtk::histogram``, both of them, and ``qtk::histogram_of_squares``: one pass over a tensor each.

Formulas in ``qtk.numerics.statistics``; ``block_size`` as in ``qtk.ops.fake_quantize``. They carry no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qtk.numerics import statistics
from qtk.ops.registration import Kernel, register


def _min_max_fake(input: Tensor, block_size: Sequence[int], scales: int) -> tuple[Tensor, Tensor]:
    low = input.new_empty(scales, dtype=torch.float32)
    return low, torch.empty_like(low)


def _histogram_fake(input: Tensor, first: Tensor, exponent: Tensor, bins: int, block_size: Sequence[int]) -> Tensor:
    return first.new_empty((first.numel(), bins), dtype=torch.int64)


def _histogram_and_min_max(
    input: Tensor, first: Tensor, exponent: Tensor, bins: int, block_size: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    counts = statistics.histogram(input, first, exponent, bins, block_size)
    return counts, *statistics.min_max(input, block_size)


def _histogram_and_min_max_fake(
    input: Tensor, first: Tensor, exponent: Tensor, bins: int, block_size: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    counts = _histogram_fake(input, first, exponent, bins, block_size)
    return counts, *_min_max_fake(input, block_size, first.numel())


def _histogram_of_squares_fake(
    input: Tensor, factors: Tensor, first: Tensor, exponent: Tensor, bins: int, block_size: Sequence[int]
) -> Tensor:
    return first.new_empty((first.numel(), bins), dtype=torch.float64)


_MIN_MAX = register(
    "min_max(Tensor input, int[] block_size, int scales) -> (Tensor, Tensor)",
    lambda input, block_size, scales: statistics.min_max(input, block_size), _min_max_fake,
    gpu=Kernel("statistics", "min_max"), native=True,
)
_HISTOGRAM = register(
    "histogram(Tensor input, Tensor first, Tensor exponent, int bins, int[] block_size) -> Tensor",
    statistics.histogram, _histogram_fake, gpu=Kernel("statistics", "histogram"), native=True,
)
_HISTOGRAM_AND_MIN_MAX = register(
    "histogram_and_min_max(Tensor input, Tensor first, Tensor exponent, int bins, int[] block_size) -> "
    "(Tensor, Tensor, Tensor)",
    _histogram_and_min_max, _histogram_and_min_max_fake, native=True,
)
_HISTOGRAM_OF_SQUARES = register(
    "histogram_of_squares(Tensor input, Tensor factors, Tensor first, Tensor exponent, int bins, int[] block_size) -> "
    "Tensor",
    statistics.histogram_of_squares, _histogram_of_squares_fake, native=True,
)


def min_max(x: Tensor, block_size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Smallest and largest element of each scale; NaN in both where there is a NaN.

    Shape: ``x`` any, not empty; results float32, one axis, the scales in their order.

    Raises: ValueError or RuntimeError, by backend, if ``x`` is empty.

    >>> min_max(torch.tensor([[1.0, 2.0], [-3.0, 0.5]]), (1, -1))
    (tensor([ 1., -3.]), tensor([2.0000, 0.5000]))
    """
    low, high = _MIN_MAX(x, block_size, statistics.count_scales(x.shape, block_size))
    return low, high


def histogram(x: Tensor, first: Tensor, exponent: Tensor, bins: int, block_size: Sequence[int]) -> Tensor:
    """Counts the elements of each scale in ``bins`` bins, as ``qtk.numerics.statistics.histogram``.

    Shape: ``x`` any; ``first`` float32 and ``exponent`` int32 [scales]; result int64 [scales, bins].

    >>> histogram(torch.tensor([0.0, 0.9, 1.0, 2.0]), torch.zeros(1), torch.zeros(1, dtype=torch.int32), 2, ())
    tensor([[2, 1]])
    """
    counts: Tensor = _HISTOGRAM(x, first, exponent, bins, block_size)
    return counts


def histogram_and_min_max(
    x: Tensor, first: Tensor, exponent: Tensor, bins: int, block_size: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """``histogram`` and ``min_max``; on the CPU in one pass where all elements share a scale.

    Shape: as theirs.

    Raises: ValueError or RuntimeError, by backend, if ``x`` is empty.

    >>> first, exponent = torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    >>> histogram_and_min_max(torch.tensor([0.0, 0.9, 1.0, 2.0]), first, exponent, 2, ())
    (tensor([[2, 1]]), tensor([0.]), tensor([2.]))
    """
    counts, low, high = _HISTOGRAM_AND_MIN_MAX(x, first, exponent, bins, block_size)
    return counts, low, high


def histogram_of_squares(
    x: Tensor, factors: Tensor, first: Tensor, exponent: Tensor, bins: int, block_size: Sequence[int]
) -> Tensor:
    """Sums the squares of ``factors`` in each bin, as ``qtk.numerics.statistics.histogram_of_squares``.

    Shape: ``x`` and ``factors`` any; ``first``, ``exponent`` as for ``histogram``; result float64 [scales, bins].

    >>> x, first, exponent = torch.tensor([0.0, 0.9, 1.0, 2.0]), torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    >>> histogram_of_squares(x, torch.tensor([1.0, 2.0, 3.0, 4.0]), first, exponent, 2, ())
    tensor([[5., 9.]], dtype=torch.float64)
    """
    sums: Tensor = _HISTOGRAM_OF_SQUARES(x, factors, first, exponent, bins, block_size)
    return sums
