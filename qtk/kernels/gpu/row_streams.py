"""Fake-quantization with one scale a row, where rows begin anywhere: the tensor is read as one stream.

Rows whose length is no multiple of 16 begin at addresses that are none of 128 bits, so a tile of rows is read and
written one element at a time. Here a tile is a run of the stream: its chunks of ``CHUNK`` elements are aligned, and a
chunk lies in at most two rows, whose scales it loads; an element takes the second one from the border on. Nothing is
summed, so the order of elements is free. On NVIDIA this takes half to all of the instructions of tiles of rows that
have a shift (``tiling.shifted``), the fewer the shorter the rows, on AMD more: counted in compiled code
(benchmarks/RESULTS.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from qtk.kernels.gpu.codes import gradient, grid_of, quantize, range_at
from qtk.kernels.gpu.launch import Call, on_device_of, programs, run_for
from qtk.kernels.gpu.tiles import WARPS, tail, wide
from qtk.kernels.gpu.tiling import TILE, Tiling, is_amd

CHUNK = 8
"""Elements of a chunk; no row is shorter."""

MOST = 1 << 30
"""Most rows, and most elements of a row: kernels count them in 32 bits."""


@triton.jit
def grid_of_row(scale_at, zero_at, row, qmin, qmax, ASYMMETRIC: tl.constexpr, IS_LIMITED: tl.constexpr):
    """The grids of rows, in the shape of ``row``."""
    scale, zero = range_at(scale_at, zero_at, row, True, qmin, qmax, ASYMMETRIC)
    return grid_of(scale, zero, qmin, qmax, IS_LIMITED)


@triton.jit
def grid_of_chunks(
    scale_at, zero_at, row, before, rows, inner, qmin, qmax, ASYMMETRIC: tl.constexpr, IS_LIMITED: tl.constexpr,
    REACH: tl.constexpr, CHUNK: tl.constexpr,
):
    """The grids of a run of the stream, [REACH / CHUNK, CHUNK].

    It begins ``before`` elements after the beginning of ``row``.
    """
    place = before + tl.arange(0, REACH // CHUNK)[:, None] * CHUNK
    ahead = (place.to(tl.uint32) // inner.to(tl.uint32)).to(tl.int32)  # unsigned: fewer instructions
    is_next = tl.arange(0, CHUNK)[None, :] >= (ahead + 1) * inner - place
    last = rows - 1 - row
    here, there = row + tl.minimum(ahead, last), row + tl.minimum(ahead + 1, last)
    low, high, by = grid_of_row(scale_at, zero_at, here, qmin, qmax, ASYMMETRIC, IS_LIMITED)
    next_low, next_high, next_by = grid_of_row(scale_at, zero_at, there, qmin, qmax, ASYMMETRIC, IS_LIMITED)
    scale, inverse, least, most = by
    next_scale, next_inverse, next_least, next_most = next_by
    by = (
        tl.where(is_next, next_scale, scale), tl.where(is_next, next_inverse, inverse),
        tl.where(is_next, next_least, least), tl.where(is_next, next_most, most),
    )
    return tl.where(is_next, next_low, low), tl.where(is_next, next_high, high), by


@triton.jit
def run_of_stream(turn, total, REACH: tl.constexpr, CHUNK: tl.constexpr):
    """Offsets and masks of a tile, up to the last 16 elements together."""
    start = wide(turn) * REACH
    lane = tl.arange(0, REACH // CHUNK)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    mask = lane < tl.minimum(total // 16 * 16 - start, REACH).to(tl.int32)
    return start + lane, (mask, mask, mask)


@triton.jit
def beginning(turn, inner, REACH: tl.constexpr):
    """The row in which a run begins, and how many elements after the row's beginning."""
    start = wide(turn) * REACH
    return (start // inner).to(tl.int32), (start % inner).to(tl.int32)


@triton.jit
def next_beginning(row, before, inner, REACH: tl.constexpr):
    """``beginning`` of the next run."""
    before += REACH
    return row + before // inner, before % inner


@triton.jit
def forward_rows_kernel(
    x_at, y_at, residual_at, scale_at, zero_at, qmin, qmax, rows, inner, total, turns, splits,
    ASYMMETRIC: tl.constexpr, MANTISSA: tl.constexpr, SMALLEST: tl.constexpr, RESIDUAL: tl.constexpr,
    REACH: tl.constexpr, CHUNK: tl.constexpr,
):
    program = tl.program_id(0)
    each = tl.cdiv(turns, splits)
    first = program * each
    row, before = beginning(first, inner, REACH)
    for turn in range(first, tl.minimum(first + each, turns)):
        grid = grid_of_chunks(
            scale_at, zero_at, row, before, rows, inner, qmin, qmax, ASYMMETRIC, not RESIDUAL, REACH, CHUNK
        )
        offsets, masks = run_of_stream(turn, total, REACH, CHUNK)
        quantize(x_at, y_at, residual_at, offsets, masks, grid, MANTISSA, SMALLEST, RESIDUAL, 0)
        row, before = next_beginning(row, before, inner, REACH)
    if program == splits - 1:
        offsets, masks = tail(total)
        last = tl.minimum(offsets // inner, rows - 1)  # their rows
        grid = grid_of_row(scale_at, zero_at, last, qmin, qmax, ASYMMETRIC, not RESIDUAL)
        quantize(x_at, y_at, residual_at, offsets, masks, grid, MANTISSA, SMALLEST, RESIDUAL, 0)


@triton.jit
def backward_rows_kernel(
    x_at, g_at, dx_at, scale_at, zero_at, qmin, qmax, rows, inner, total, turns, splits,
    ASYMMETRIC: tl.constexpr, MANTISSA: tl.constexpr, SMALLEST: tl.constexpr, RESIDUAL: tl.constexpr,
    REACH: tl.constexpr, CHUNK: tl.constexpr,
):
    program = tl.program_id(0)
    each = tl.cdiv(turns, splits)
    first = program * each
    row, before = beginning(first, inner, REACH)
    for turn in range(first, tl.minimum(first + each, turns)):
        grid = grid_of_chunks(
            scale_at, zero_at, row, before, rows, inner, qmin, qmax, ASYMMETRIC, False, REACH, CHUNK
        )
        offsets, masks = run_of_stream(turn, total, REACH, CHUNK)
        gradient(x_at, g_at, dx_at, offsets, masks, grid, MANTISSA, SMALLEST, RESIDUAL, 0)
        row, before = next_beginning(row, before, inner, REACH)
    if program == splits - 1:
        offsets, masks = tail(total)
        last = tl.minimum(offsets // inner, rows - 1)  # their rows
        grid = grid_of_row(scale_at, zero_at, last, qmin, qmax, ASYMMETRIC, False)
        gradient(x_at, g_at, dx_at, offsets, masks, grid, MANTISSA, SMALLEST, RESIDUAL, 0)


def is_row_stream(tiling: Tiling) -> bool:
    """Whether a tensor has one scale a row, its rows begin at any address, and it is better read as a stream."""
    is_rows = tiling.outer == tiling.s1 == tiling.middle == tiling.step2 == 1 and tiling.s2 > 1
    if is_amd() or not is_rows or tiling.inner % 16 == 0 or tiling.s2 * tiling.inner < 2 * TILE:
        return False
    return CHUNK <= tiling.inner <= MOST and tiling.s2 <= MOST


def launch_rows(
    kernel: Any, tiling: Tiling, streams: Sequence[Tensor], given: Sequence[object], constants: Mapping[str, object],
    call: Call | None = None,
) -> None:
    """Launches ``kernel`` on the tensors it reads and writes, which have the rows of ``tiling``.

    ``given`` are its arguments between these and the lengths, ``constants`` its ``tl.constexpr`` arguments but the
    shape of a run, ``call`` what it is kept for (``launch.run_for``). As tiles do (``tiling.fitted``), runs of 32 bits
    have half the elements for twice the programs.
    """
    total = streams[0].numel()
    reach = TILE // 2 if any(each.itemsize >= 4 for each in streams) else TILE
    turns = -(-total // reach)
    with on_device_of(streams[0]):
        splits = -(-turns // -(-turns // min(turns, programs(streams[0].device))))  # no program is without a turn
        run_for(
            call, kernel, (splits,), *streams, *given, tiling.s2, tiling.inner, total, turns, splits, **constants,
            REACH=reach, CHUNK=CHUNK, num_warps=WARPS,
        )
