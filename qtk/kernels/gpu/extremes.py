"""Smallest and largest elements gathered tensor by tensor, as Triton kernels: formulas of ``qtk.numerics.extremes``.

One launch a tensor. The last program of a group of scales joins what the others have found
with what was known before; the last of a tensor counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from qtk.errors import SpecError
from qtk.kernels.gpu.launch import on_device_of, programs, run, tickets
from qtk.kernels.gpu.tiles import (
    arguments,
    by_lane,
    draws_last_ticket,
    is_dense,
    lanes,
    load,
    partials,
    places,
    shape,
    store_partials,
    sums_of_lanes,
    tile,
)
from qtk.kernels.gpu.tiling import shifted, tiling_of
from qtk.numerics import extremes

MOST_ELEMENTS = 1 << 31
"""Elements left out are counted in 32 bits."""

COUNTERS = 3
"""Of a tensor, beside the tickets of its groups: its ticket, the elements left out, the groups that are broken."""


@triton.jit
def extremes_kernel(
    x_at, low_at, high_at, counts_at, parts_at, tickets_at, bound, least, elements, s1, middle, s2, inner, step1,
    step2, turns, splits,
    SCALES: tl.constexpr, REACH: tl.constexpr, COLUMNS: tl.constexpr, FLAT: tl.constexpr, SHIFT: tl.constexpr,
    LANES: tl.constexpr, PARTS: tl.constexpr,
):
    """After the tickets of the groups there are three numbers of the launch, all 0 before and after it."""
    program = tl.program_id(0)
    along1, along2, exists, _ = places(program // splits, s2, step1, step2, SCALES)
    low = tl.full([LANES, SCALES] if COLUMNS else [SCALES, LANES], float("inf"), tl.float32)
    high = -low
    left_out = tl.zeros_like(low).to(tl.int32)
    each = tl.cdiv(turns, splits)
    first = (program % splits) * each
    for turn in range(first, tl.minimum(first + each, turns)):
        offsets, masks = tile(
            turn, along1, along2, exists, s1, middle, s2, inner, SCALES, REACH, COLUMNS, FLAT, SHIFT, False
        )
        x = load(x_at + offsets, masks, SHIFT).to(tl.float32)
        is_left_out = x <= bound
        low, high = widened(low, high, x, masks[0] & (is_left_out == 0), SCALES, REACH, COLUMNS, LANES)
        # 0, which lies outside of the mask, is above every bound
        left_out += sums_of_lanes(is_left_out.to(tl.int32), SCALES, REACH, COLUMNS, LANES)
    lowest, highest = ends(low, high, COLUMNS)
    sentinels = tl.sum(tl.reshape(left_out, [SCALES * LANES]), 0)
    add_extremes(
        program, tl.num_programs(0), lowest, highest, sentinels, low_at, high_at, counts_at, parts_at, tickets_at,
        least, elements, s2, step1, step2, splits, SCALES, PARTS,
    )


@triton.jit
def add_extremes(
    program, programs, lowest, highest, sentinels, low_at, high_at, counts_at, parts_at, tickets_at, least, elements,
    s2, step1, step2, splits, SCALES: tl.constexpr, PARTS: tl.constexpr,
):
    """Adds what one of the ``programs`` of a tensor found to what was known before."""
    lowest, highest, last = joined(program, lowest, highest, parts_at, tickets_at, splits, SCALES, PARTS)
    launch_at = tickets_at + programs // splits
    if last:
        _, _, exists, index = places(program // splits, s2, step1, step2, SCALES)
        broken = exists & ((lowest != lowest) | (highest == float("inf")))
        if tl.sum(broken.to(tl.int32), 0) > 0:
            tl.atomic_add(launch_at + 2, 1, sem="relaxed")
        before = tl.load(low_at + index, mask=exists, other=0.0)
        before_high = tl.load(high_at + index, mask=exists, other=0.0)
        is_known = before != before  # a NaN stays
        tl.store(low_at + index, tl.where(is_known | (before < lowest), before, lowest), mask=exists)
        highest = tl.where(lowest == lowest, highest, float("nan"))
        tl.store(high_at + index, tl.where(is_known | (before_high > highest), before_high, highest), mask=exists)
    if sentinels > 0:
        tl.atomic_add(launch_at + 1, sentinels, sem="relaxed")
    if draws_last_ticket(launch_at, programs):
        sentinels = tl.atomic_xchg(launch_at + 1, 0)
        broken_groups = tl.atomic_xchg(launch_at + 2, 0)
        is_broken = (broken_groups > 0) | ((sentinels > 0) & (sentinels < least))
        tl.store(counts_at, tl.load(counts_at) + elements - sentinels)
        tl.store(counts_at + 1, tl.load(counts_at + 1) + sentinels)
        tl.store(counts_at + 2, tl.load(counts_at + 2) + is_broken.to(tl.int64))
        tl.store(launch_at, 0)


@triton.jit
def widened(
    low, high, x, counts,
    SCALES: tl.constexpr, REACH: tl.constexpr, COLUMNS: tl.constexpr, LANES: tl.constexpr,
):
    """The extremes of ``LANES`` with the elements of a tile that count; ``low`` is NaN from the first NaN on."""
    of_low = by_lane(tl.where(counts, x, float("inf")), SCALES, REACH, COLUMNS, LANES)
    of_high = by_lane(tl.where(counts, x, float("-inf")), SCALES, REACH, COLUMNS, LANES)
    low = lower(low, tl.reduce(of_low, 0 if COLUMNS else 2, lower))
    return low, tl.maximum(high, tl.max(of_high, 0 if COLUMNS else 2))


@triton.jit
def lower(one, other):
    """The lower of two numbers; NaN if one of them is."""
    return tl.minimum(one, other, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def ends(low, high, COLUMNS: tl.constexpr):
    """Smallest, NaN where there is one, and largest of each scale of a tile."""
    broken = tl.max(tl.where(low == low, 0.0, 1.0), 0 if COLUMNS else 1)
    lowest = tl.min(tl.where(low == low, low, float("inf")), 0 if COLUMNS else 1)
    return tl.where(broken > 0, float("nan"), lowest), tl.max(high, 0 if COLUMNS else 1)


@triton.jit
def joined(program, lowest, highest, parts_at, tickets_at, splits, SCALES: tl.constexpr, PARTS: tl.constexpr):
    """The ends of the whole group if this is its last program, and whether it is; else stores the program's part."""
    last = splits == 1
    if splits > 1:
        group = program // splits
        store_partials(parts_at, program, lowest, highest, SCALES)
        last = draws_last_ticket(tickets_at + group, splits)
        if last:
            lowest = tl.full([SCALES], float("inf"), tl.float32)
            highest = -lowest
            spoilt = tl.zeros([SCALES], tl.float32)
            for begin in range(0, splits, PARTS):
                first_at, second_at, there = partials(parts_at, group, begin, splits, PARTS, SCALES)
                low = tl.load(first_at, mask=there, other=float("inf"), cache_modifier=".cg")
                spoilt = tl.maximum(spoilt, tl.max(tl.where(low == low, 0.0, 1.0), 0))
                lowest = tl.minimum(lowest, tl.min(tl.where(low == low, low, float("inf")), 0))
                high = tl.load(second_at, mask=there, other=float("-inf"), cache_modifier=".cg")
                highest = tl.maximum(highest, tl.max(high, 0))
            lowest = tl.where(spoilt > 0, float("nan"), lowest)
            tl.store(tickets_at + group, 0)
    return lowest, highest, last


def add_extremes_(
    x: Tensor, block_size: Sequence[int], bound: float, least: int, low: Tensor, high: Tensor, counts: Tensor
) -> None:
    """As ``qtk.ops.extremes.add_extremes_``. Raises: SpecError if ``x`` is empty."""
    if not x.numel():
        raise SpecError(f"a tensor of shape {tuple(x.shape)} has no extremes; observe one that has elements")
    x = x if is_dense(x) else x.contiguous()
    tiling = tiling_of(x, block_size) if x.numel() < MOST_ELEMENTS and x.dtype != torch.float64 else None
    if tiling is None:
        extremes.add_extremes_(x.contiguous(), block_size, bound, least, low, high, counts)
        return
    tiling = shifted(tiling, x, light=True)
    splits = tiling.splits(programs(x.device))
    parts = low.new_empty(tiling.partial_results(splits))
    with on_device_of(x):
        run(
            extremes_kernel, (tiling.groups * splits,),
            x, low, high, counts, parts, tickets(x.device, tiling.groups + COUNTERS), bound, least, x.numel(),
            *arguments(tiling), splits, LANES=lanes(tiling, x), PARTS=tiling.parts(splits), **shape(tiling),
        )
