"""How a tensor is divided into tiles for GPU programs, so that each program loads the scales it needs once.

The elements of a dense tensor, in memory order, are viewed as ``[outer, s1, middle, s2, inner]``: an element's scale
has index ``s1 · step1 + s2 · step2``, whatever its index on the other three axes. Every granularity with at most two
block axes has this form: per tensor, all elements are ``inner``; per channel ``s2`` is the channel; blocks of
``(4, 32)`` cut a matrix into ``s1 = rows / 4``, ``middle = 4``, ``s2 = columns / 32``, ``inner = 32``.

A tile is some scales along ``s2`` times some elements along ``inner``, or along ``middle`` where ``inner`` has length 1
(channels last). A program loops over all tiles with the same scales (its *turns*); if these are many, they are split
among several programs, and a reduction gets a second stage.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qtk.core.granularity import WHOLE

TILE = 4096
"""Elements of a tile."""

LONG = 512
"""Elements of a row that is long."""

SHORTEST = 16
"""Shortest rows that are worth a shift."""

MOST_COLUMNS = 128
"""Most scales along the columns of a tile."""

MOST_COUNTED = 1 << 30
"""Kernels count turns, and scales along an axis, in 32 bits: 64-bit division takes three times the instructions."""


@dataclass(frozen=True)
class Tiling:
    """The lengths of the five axes, the steps between scales, and the size of a tile.

    A tile has ``scales_a_tile`` scales times ``reach`` elements, both powers of two. If ``columns``, ``inner`` has
    length 1 and the elements of a tile are along ``middle``. With a ``shift``, tiles along ``inner`` begin at the
    multiple of it before their first element.
    """

    outer: int
    s1: int
    middle: int
    s2: int
    inner: int
    step1: int
    step2: int
    columns: bool
    scales_a_tile: int
    reach: int
    shift: int = 0

    @functools.cached_property
    def flat(self) -> bool:
        """Whether the tensor has one scale, and all elements are along ``inner``."""
        return self.inner == self.outer * self.s1 * self.middle * self.s2 * self.inner

    @functools.cached_property
    def is_aligned(self) -> bool:
        """Whether what is contiguous in memory begins at multiples of 16 elements."""
        return (self.s2 if self.columns else self.inner) % 16 == 0

    @property
    def is_of_long_rows(self) -> bool:
        """Whether a tile has whole rows, so long that a thread has few addresses and scales."""
        return self.turns == 1 and self.reach >= LONG

    @functools.cached_property
    def groups(self) -> int:
        """Number of tiles with different scales."""
        return self.s1 * -(-self.s2 // self.scales_a_tile)

    @functools.cached_property
    def turns(self) -> int:
        """Number of tiles with the same scales."""
        reached = self.middle if self.columns else self.inner + max(self.shift - 1, 0)
        return -(-reached // self.reach) * self.outer * (1 if self.columns else self.middle)

    @functools.cached_property
    def of_half_the_reach(self) -> Tiling:
        """With tiles half as long."""
        return replace(self, reach=self.reach // 2)

    def splits(self, programs: int) -> int:
        """Number of programs that share the turns of a group, so that there are about ``programs`` in all."""
        wanted = min(self.turns, max(1, programs // self.groups))
        return -(-self.turns // -(-self.turns // wanted))  # no program is without a turn

    def partial_results(self, splits: int) -> int:
        """Numbers that programs which share a group store: two of each scale of its tile."""
        return 2 * self.groups * splits * self.scales_a_tile if splits > 1 else 0

    def parts(self, splits: int) -> int:
        """How many partial sums a program adds at a time, a power of two: few registers where there are few."""
        return min(TILE // self.scales_a_tile, _power_of_two(splits))


def shifted(tiling: Tiling, *tensors: Tensor, light: bool = False) -> Tiling:
    """The tiling, with a shift if rows begin or end anywhere: so that 128 bits are read and written at a time.

    ``tensors`` are those that are read and written in tiles. Where one of them itself begins anywhere, none is shifted:
    a tile reads the whole 128 bits that its first and last element lie in, and these belong to the tensor's memory only
    where its own beginning is aligned. Nor is, but on AMD, what is already a tile of whole long rows: lanes that a
    longer one leaves idle would take more instructions than the loads save, unless the work on an element is ``light``.
    (Counted in compiled code, benchmarks/RESULTS.md.)

    >>> import torch
    >>> x = torch.zeros(64, 197)
    >>> tiling = shifted(tiling_of(x, (1, -1)), x)
    >>> tiling.shift, tiling.scales_a_tile, tiling.reach
    (4, 16, 256)
    """
    if tiling.columns or tiling.is_aligned or tiling.inner < SHORTEST:
        return tiling
    if any(each.data_ptr() % 16 for each in tensors) or not (light or is_amd() or not tiling.is_of_long_rows):
        return tiling
    return _with_shift(tiling, 16 // max(each.itemsize for each in tensors))


@functools.lru_cache(maxsize=4096)
def _with_shift(tiling: Tiling, shift: int) -> Tiling:
    scales_a_tile, reach = tile_of(tiling.s2, tiling.middle, tiling.inner + shift - 1, columns=False)
    moved = replace(tiling, shift=shift, scales_a_tile=scales_a_tile, reach=reach)
    return moved if moved.turns <= MOST_COUNTED else tiling


def fitted(tiling: Tiling, *tensors: Tensor, sums: bool = False) -> Tiling:
    """The tiling for fake-quantization, which reads and writes ``tensors``: ``shifted``, and in few registers.

    On NVIDIA half the reach of what is summed or has 32 bits: a thread then has 8 elements at a time, and as many bytes
    are on their way, for twice the programs are resident.

    >>> import torch
    >>> x = torch.zeros(64, 1024)
    >>> tiling = tiling_of(x, (1, -1))
    >>> tiling.reach, fitted(tiling, x).reach, fitted(tiling, x.half()).reach, fitted(tiling, x.half(), sums=True).reach
    (1024, 512, 1024, 512)
    """
    tiling = tiling if tiling.flat else shifted(tiling, *tensors)  # a stream has a tail
    if is_amd() or tiling.reach < SHORTEST or not (sums or any(each.itemsize >= 4 for each in tensors)):
        return tiling
    return tiling.of_half_the_reach


def tiling_of(x: Tensor, block_size: Sequence[int]) -> Tiling | None:
    """The tiling of a dense tensor; ``None`` if its blocks do not have this form, or turns or scales are too many.

    >>> import torch
    >>> tiling = tiling_of(torch.zeros(8, 3, 5, 5), (-1, 1, -1, -1))
    >>> tiling.outer, tiling.s1, tiling.middle, tiling.s2, tiling.inner
    (8, 1, 1, 3, 25)
    """
    return _tiling(tuple(x.shape), x.stride(), tuple(block_size))


@functools.lru_cache(maxsize=4096)
def _tiling(shape: tuple[int, ...], strides: tuple[int, ...], block_size: tuple[int, ...]) -> Tiling | None:
    axes = _merged(shape, strides, block_size)
    scaled = [axis for axis, (_, step) in enumerate(axes) if step]
    if len(scaled) > 2:
        return None
    if not scaled:
        outer, s1, middle, s2 = 1, 1, 1, 1
        step1 = step2 = 0
        inner = math.prod(length for length, _ in axes)
    else:
        (s2, step2), inner = axes[scaled[-1]], math.prod(length for length, _ in axes[scaled[-1] + 1 :])
        s1, step1 = axes[scaled[0]] if len(scaled) == 2 else (1, 0)
        before = math.prod(length for length, _ in axes[: scaled[0]])
        between = math.prod(length for length, _ in axes[scaled[0] + 1 : scaled[-1]])
        # with one axis of scales, no axis before it has a scale
        outer, middle = (before, between) if len(scaled) == 2 else (1, before)
    columns = inner == 1 and s2 > 1
    if not columns and len(scaled) == 1:
        outer, middle = middle, 1
    scales_a_tile, reach = tile_of(s2, middle, inner, columns)
    tiling = Tiling(outer, s1, middle, s2, inner, step1, step2, columns, scales_a_tile, reach)
    return tiling if max(tiling.turns, tiling.s2) <= MOST_COUNTED else None


def _merged(shape: Sequence[int], strides: Sequence[int], block_size: Sequence[int]) -> list[tuple[int, int]]:
    """Axes in memory order as (length, step from one scale to the next or 0), merged where that is possible."""
    steps, count = [], 1
    sizes = block_size or [WHOLE] * len(shape)
    for length, size in zip(reversed(shape), reversed(sizes), strict=True):
        block = length if size == WHOLE else size
        steps.append((length // max(block, 1), count, block))
        count *= length // max(block, 1)
    steps.reverse()
    axes: list[tuple[int, int]] = []
    for axis in sorted(range(len(shape)), key=lambda axis: strides[axis], reverse=True):
        blocks, step, block = steps[axis]
        for length, scale_step in ((blocks, step), (block, 0)):
            if length == 1:
                continue
            if axes and axes[-1][1] == scale_step * length:
                axes[-1] = (axes[-1][0] * length, scale_step)
            else:
                axes.append((length, scale_step))
    return axes


def is_amd() -> bool:
    """Whether this torch is built for AMD's GPUs."""
    return torch.version.hip is not None


def tile_of(s2: int, middle: int, inner: int, columns: bool) -> tuple[int, int]:
    """Scales and reach of a tile of at most ``TILE`` elements: long runs of memory, with few idle lanes.

    >>> tile_of(64, 1, 768, False), tile_of(64, 4096, 1, True)
    ((4, 1024), (64, 64))
    """
    if columns:
        scales = min(_power_of_two(s2), MOST_COLUMNS)
        return scales, min(TILE // scales, _power_of_two(middle))
    reach = min(
        (2**power for power in range(2, TILE.bit_length())), key=lambda reach: (_waste(inner, reach), -reach)
    )
    return min(TILE // reach, _power_of_two(s2)), reach


def _waste(length: int, reach: int) -> float:
    """Share of idle lanes; up to a quarter counts as none, because idle lanes cost less than gaps in memory."""
    lanes = -(-length // reach) * reach
    share = (lanes - length) / lanes
    return share if share > 1 / 4 else 0.0


def _power_of_two(length: int) -> int:
    return 1 << max(length - 1, 0).bit_length()
