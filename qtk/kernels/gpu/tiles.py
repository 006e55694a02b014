"""Device functions shared by the kernels: the elements of a tile, its scales, and the last program of a group."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qtk.kernels.gpu.tiling import Tiling, is_amd

WARPS = 8


@triton.jit
def divided(number, by):
    """Quotient and remainder of integers that are not negative: without signs, in fewer instructions."""
    zero = tl.full([], 0, tl.int32)  # in the interpreter they may be Python's
    quotient = ((zero + number).to(tl.uint32) // (zero + by).to(tl.uint32)).to(tl.int32)
    return quotient, number - quotient * by


@triton.jit
def places(group, s2, step1, step2, SCALES: tl.constexpr):
    """For a group of scales: its index along s1, its indices along s2, their mask, and the indices of its scales."""
    row, tile_of_row = divided(group, tl.cdiv(s2, SCALES))
    along1 = wide(row)
    along2 = tile_of_row * SCALES + tl.arange(0, SCALES)
    return along1, along2, along2 < s2, along1 * step1 + along2.to(tl.int64) * step2


@triton.jit
def again(number):
    """The same number, for what comes after a main loop.

    Compilers do not know that it is the same: they do not know that the grid's third axis has length 1. So what was
    computed from it before the loop is computed anew, and not kept in registers from turn to turn, or spilled.
    """
    return number + tl.program_id(2)


@triton.jit
def wide(number):
    """An integer in 64 bits; in the interpreter it may be Python's."""
    return tl.full([], 0, tl.int64) + number


@triton.jit
def tile(
    turn, along1, along2, exists, s1, middle, s2, inner,
    SCALES: tl.constexpr, REACH: tl.constexpr, COLUMNS: tl.constexpr, FLAT: tl.constexpr, SHIFT: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Offsets of the elements of one tile, [SCALES, REACH], or [REACH, SCALES] if ``COLUMNS``, and three masks.

    The masks: what belongs to the tile; what is read, and what is written, 128 bits at a time. They differ where a row,
    which begins anywhere, has a ``SHIFT``.

    ``FLAT`` is a tensor with one scale, a stream: no division of turns. If it has a ``TAIL``, the masks end before it;
    if it has a ``SHIFT``, it is only read, to the end of the last 128 bits.
    """
    if FLAT:
        start = wide(turn) * REACH
        lane = tl.arange(0, REACH)[None, :]
        end = inner // 16 * 16 if TAIL else inner
        offsets = start + lane
        left = tl.minimum(end - start, REACH).to(tl.int32)
        mask = lane < left
        read = lane // SHIFT * SHIFT < left if SHIFT else mask
        written = mask
    elif COLUMNS:
        chunks = tl.cdiv(middle, REACH)
        outer, chunk = divided(turn, chunks)
        row = chunk * REACH + tl.arange(0, REACH)
        start = (wide(outer) * s1 + along1) * middle
        offsets = (start + row)[:, None] * s2 + along2.to(tl.int64)[None, :]
        mask = (row < middle)[:, None] & exists[None, :]
        read = mask
        written = mask
    else:
        chunks = tl.cdiv(inner + SHIFT - 1 if SHIFT else inner, REACH)
        rest, chunk = divided(turn, chunks)
        column = chunk * REACH + tl.arange(0, REACH)
        outer, between = divided(rest, middle)
        start = ((wide(outer) * s1 + along1) * middle + between) * s2
        begin = (start + along2.to(tl.int64)) * inner
        if SHIFT:
            before = (begin % SHIFT).to(tl.int32)[:, None]
            begin = begin // SHIFT * SHIFT
            run = (column // SHIFT * SHIFT)[None, :]  # where the 128 bits of an element begin
            read = exists[:, None] & (run < before + inner)
            mask = exists[:, None] & (column[None, :] >= before) & (column[None, :] < before + inner)
            written = exists[:, None] & (run >= before) & (run + SHIFT <= before + inner)
        else:
            mask = exists[:, None] & (column < inner)[None, :]
            read = mask
            written = mask
        offsets = begin[:, None] + column[None, :]
    return offsets, (mask, read, written)


@triton.jit
def load(at, masks, SHIFT: tl.constexpr):
    """The elements of a tile, 0 outside of it."""
    mask, read, _ = masks
    value = tl.load(at, mask=read, other=0)
    if SHIFT:
        value = tl.where(mask, value, tl.zeros_like(value))
    return value


@triton.jit
def store(at, value, masks, SHIFT: tl.constexpr):
    """Writes the elements of a tile: those at the ends of a row that has a ``SHIFT`` one by one."""
    mask, _, written = masks
    tl.store(at, value, mask=written)
    if SHIFT:
        tl.store(at, value, mask=mask & (written == 0))


@triton.jit
def tail(inner):
    """Offsets and masks of the last elements of a stream, [1, 16]: fewer than 128 bits may be left.

    A mask that ends at any element would make all accesses of a tile scalar.
    """
    offsets = inner // 16 * 16 + tl.arange(0, 16)[None, :]
    mask = offsets < inner
    return offsets, (mask, mask, mask)


@triton.jit
def spread(value, COLUMNS: tl.constexpr):
    """One value per scale, in a shape that broadcasts against the tile."""
    if COLUMNS:
        return value[None, :]
    else:
        return value[:, None]


@triton.jit
def by_lane(values, SCALES: tl.constexpr, REACH: tl.constexpr, COLUMNS: tl.constexpr, LANES: tl.constexpr):
    """The elements of a tile that ``LANES`` results a scale are made of, along one axis: the first if ``COLUMNS``."""
    return tl.reshape(values, [REACH // LANES, LANES, SCALES] if COLUMNS else [SCALES, LANES, REACH // LANES])


@triton.jit
def sums_of_lanes(values, SCALES: tl.constexpr, REACH: tl.constexpr, COLUMNS: tl.constexpr, LANES: tl.constexpr):
    """Of a tile, ``LANES`` sums a scale: [SCALES, LANES], or [LANES, SCALES] if ``COLUMNS``."""
    return tl.sum(by_lane(values, SCALES, REACH, COLUMNS, LANES), 0 if COLUMNS else 2)


@triton.jit
def store_partials(parts_at, program, first, second, SCALES: tl.constexpr):
    """Stores two partial results of each scale of a program's tile, [SCALES] each, beside other programs' results.

    Counted in 32 bits: only where there are few programs do some share a group of scales.
    """
    first_at = parts_at + program * (2 * SCALES) + tl.arange(0, SCALES)
    tl.store(first_at, first)
    tl.store(first_at + SCALES, second)


@triton.jit
def partials(parts_at, group, begin, splits, PARTS: tl.constexpr, SCALES: tl.constexpr):
    """Where the programs of a group stored theirs, from its program ``begin`` on, and a mask: [PARTS, SCALES] each."""
    split = begin + tl.arange(0, PARTS)
    program = group * splits + split
    first_at = parts_at + program[:, None] * (2 * SCALES) + tl.arange(0, SCALES)[None, :]
    return first_at, first_at + SCALES, tl.broadcast_to((split < splits)[:, None], [PARTS, SCALES])


@triton.jit
def draws_last_ticket(ticket_at, splits):
    """Whether this program is the last of its group to finish; all stores of the group are then visible to it."""
    tl.debug_barrier()  # every thread of the program has stored
    return tl.atomic_add(ticket_at, 1, sem="acq_rel") + 1 == splits


def arguments(tiling: Tiling) -> tuple[int, ...]:
    """The sizes of a tiling in the order of the kernels' arguments: s1, middle, s2, inner, step1, step2, turns."""
    return tiling.s1, tiling.middle, tiling.s2, tiling.inner, tiling.step1, tiling.step2, tiling.turns


def shape(tiling: Tiling) -> dict[str, int | bool]:
    """The ``tl.constexpr`` arguments of a tiling."""
    return {"SCALES": tiling.scales_a_tile, "REACH": tiling.reach, "COLUMNS": tiling.columns, "FLAT": tiling.flat,
            "SHIFT": tiling.shift, "num_warps": WARPS}


def lanes(tiling: Tiling, *read: Tensor) -> int:
    """How many sums a scale are kept from turn to turn: of what one thread reads, one takes fewer registers than all.

    A thread reads 128 bits of the narrowest of ``read`` at a time, and where scales are along columns several rows of
    that. Where runs of memory begin anywhere it reads element by element; all sums are then kept, but on NVIDIA those
    along columns of what reads several tensors, which had no registers left.
    """
    has_runs = tiling.is_aligned or tiling.flat or tiling.shift > 0
    if not has_runs and (is_amd() or not tiling.columns or len(read) == 1):
        return tiling.reach
    run = 16 // min(each.itemsize for each in read) if has_runs else 1
    if tiling.columns:
        return min(tiling.reach, run * WARPS * (64 if is_amd() else 32) // tiling.scales_a_tile)
    return tiling.reach // min(run, tiling.reach)


def has_tail(tiling: Tiling) -> bool:
    """Whether the tensor is a stream whose last elements, after the last 16 together, need a tile of their own."""
    return tiling.flat and tiling.inner % 16 != 0


def is_dense(x: Tensor) -> bool:
    """Whether the tensor is dense and non-overlapping in memory, in any order of its axes."""
    return x.is_contiguous() or x.stride() == torch.empty_like(x, device="meta").stride()
