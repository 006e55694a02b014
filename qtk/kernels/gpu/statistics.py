"""Minimum, maximum and histogram as Triton kernels; formulas of ``qtk.numerics.statistics``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from qtk.errors import SpecError
from qtk.kernels.gpu.extremes import ends, joined, widened
from qtk.kernels.gpu.launch import on_device_of, programs, run, tickets
from qtk.kernels.gpu.tiles import arguments, is_dense, lanes, load, places, shape, spread, tile
from qtk.kernels.gpu.tiling import shifted, tiling_of
from qtk.numerics import statistics

MOST_BINS = 4096
"""Most bins that fit into the shared memory of a program; larger histograms use the reference."""


@triton.jit
def min_max_kernel(
    x_at, low_at, high_at, parts_at, tickets_at, s1, middle, s2, inner, step1, step2, turns, splits,
    SCALES: tl.constexpr, REACH: tl.constexpr, COLUMNS: tl.constexpr, FLAT: tl.constexpr, SHIFT: tl.constexpr,
    LANES: tl.constexpr, PARTS: tl.constexpr,
):
    program = tl.program_id(0)
    along1, along2, exists, index = places(program // splits, s2, step1, step2, SCALES)
    low = tl.full([LANES, SCALES] if COLUMNS else [SCALES, LANES], float("inf"), tl.float32)
    high = -low
    each = tl.cdiv(turns, splits)
    first = (program % splits) * each
    for turn in range(first, tl.minimum(first + each, turns)):
        offsets, masks = tile(
            turn, along1, along2, exists, s1, middle, s2, inner, SCALES, REACH, COLUMNS, FLAT, SHIFT, False
        )
        x = load(x_at + offsets, masks, SHIFT).to(tl.float32)
        low, high = widened(low, high, x, masks[0], SCALES, REACH, COLUMNS, LANES)
    lowest, highest = ends(low, high, COLUMNS)
    lowest, highest, last = joined(program, lowest, highest, parts_at, tickets_at, splits, SCALES, PARTS)
    if last:
        tl.store(low_at + index, lowest, mask=exists)
        tl.store(high_at + index, tl.where(lowest == lowest, highest, float("nan")), mask=exists)


@triton.jit
def histogram_kernel(
    x_at, counts_at, first_at, unit_at, bins, s1, middle, s2, inner, step1, step2, turns, splits,
    SCALES: tl.constexpr, REACH: tl.constexpr, COLUMNS: tl.constexpr, FLAT: tl.constexpr, SHIFT: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Counts in shared memory if the tile has one scale, else with atomic adds; integer sums are deterministic."""
    program = tl.program_id(0)
    along1, along2, exists, index = places(program // splits, s2, step1, step2, SCALES)
    first_bin = spread(tl.load(first_at + index, mask=exists, other=0.0), COLUMNS)
    unit = spread(tl.load(unit_at + index, mask=exists, other=1.0), COLUMNS)
    own = tl.zeros([SLOTS], tl.int32)
    each = tl.cdiv(turns, splits)
    first = (program % splits) * each
    for turn in range(first, tl.minimum(first + each, turns)):
        offsets, masks = tile(
            turn, along1, along2, exists, s1, middle, s2, inner, SCALES, REACH, COLUMNS, FLAT, SHIFT, False
        )
        mask, _, _ = masks
        x = load(x_at + offsets, masks, SHIFT).to(tl.float32)
        place = tl.floor(x * unit)
        place = tl.where((x < 0) & (place > -1.0), -1.0, place) - first_bin  # the product may underflow to 0
        counted = mask & (place >= 0) & (place < bins)
        bin = tl.where(counted, place, 0.0).to(tl.int32)
        if SCALES == 1:
            slot = tl.where(counted, bin, bins)  # one slot more than there are bins
            own += tl.histogram(tl.reshape(slot, [REACH]), SLOTS)
        else:
            at = spread(index, COLUMNS) * bins + bin
            tl.atomic_add(counts_at + at, tl.full(at.shape, 1, tl.int64), mask=counted, sem="relaxed")
    if SCALES == 1:
        slots = tl.arange(0, SLOTS)
        tl.atomic_add(counts_at + tl.sum(index, 0) * bins + slots, own.to(tl.int64), mask=slots < bins, sem="relaxed")


def min_max(x: Tensor, block_size: Sequence[int], scales: int) -> tuple[Tensor, Tensor]:
    """As ``qtk.ops.statistics.min_max``; ``scales`` is their number. Raises: SpecError if ``x`` is empty."""
    if not x.numel():
        raise SpecError(f"a tensor of shape {tuple(x.shape)} has no extremes; observe one that has elements")
    x = x if is_dense(x) else x.contiguous()
    tiling = tiling_of(x, block_size)
    if tiling is None:
        return statistics.min_max(x.contiguous(), block_size)
    tiling = shifted(tiling, x, light=True)
    low = torch.empty(scales, dtype=torch.float32, device=x.device)
    high = torch.empty_like(low)
    splits = tiling.splits(programs(x.device))
    shared = low, low
    if splits > 1:
        shared = low.new_empty(tiling.partial_results(splits)), tickets(x.device, tiling.groups)
    with on_device_of(x):
        run(
            min_max_kernel, (tiling.groups * splits,),
            x, low, high, *shared, *arguments(tiling), splits,
            LANES=lanes(tiling, x), PARTS=tiling.parts(splits), **shape(tiling),
        )
    return low, high


def histogram(x: Tensor, first: Tensor, exponent: Tensor, bins: int, block_size: Sequence[int]) -> Tensor:
    """As ``qtk.ops.statistics.histogram``."""
    x = x if is_dense(x) else x.contiguous()
    tiling = tiling_of(x, block_size) if x.numel() else None
    if tiling is None or bins > MOST_BINS:
        return statistics.histogram(x.contiguous(), first, exponent, bins, block_size)
    tiling = shifted(tiling, x) if tiling.flat else tiling  # where bins are in global memory, nothing is gained
    counts = torch.zeros(first.numel(), bins, dtype=torch.int64, device=x.device)
    units = torch.ldexp(torch.ones_like(first), -exponent)
    splits = tiling.splits(programs(x.device))
    with on_device_of(x):
        run(
            histogram_kernel, (tiling.groups * splits,),
            x, counts, first.contiguous(), units, bins, *arguments(tiling), splits,
            SLOTS=triton.next_power_of_2(bins + 1), **shape(tiling),
        )
    return counts
