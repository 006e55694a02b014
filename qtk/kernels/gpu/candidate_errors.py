"""The errors of all candidate ranges of a tensor in one launch; formulas in ``qtk.numerics.candidate_errors``.

A program evaluates one candidate of the scales of its tile, over all elements of these scales or its split of them. All
candidates read the same elements, so these come from the L2 cache. Sums are float32 within a tile and float64 across
tiles; the program that takes the last ticket adds the splits up in order, so that results are deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from qtk.kernels.gpu.codes import grid_at, rounded
from qtk.kernels.gpu.division import limited, limited_quotient, quotient
from qtk.kernels.gpu.launch import on_device_of, programs, run, tickets
from qtk.kernels.gpu.tiles import arguments, draws_last_ticket, is_dense, load, places, shape, tile
from qtk.kernels.gpu.tiling import shifted, tiling_of
from qtk.numerics import candidate_errors as reference


@triton.jit
def errors_kernel(
    x_at, weights_at, scale_at, zero_at, qmin, qmax, clipped_factor, errors_at, parts_at, tickets_at, count, s1, middle,
    s2, inner, step1, step2, turns, splits,
    ASYMMETRIC: tl.constexpr, WEIGHTED: tl.constexpr, SQUARED: tl.constexpr, CLIPPED: tl.constexpr,
    SCALES: tl.constexpr, REACH: tl.constexpr, COLUMNS: tl.constexpr, FLAT: tl.constexpr, SHIFT: tl.constexpr,
    PARTS: tl.constexpr,
):
    program = tl.program_id(0)
    candidate = tl.program_id(1).to(tl.int64) * count
    group = program // splits
    along1, along2, exists, index = places(group, s2, step1, step2, SCALES)
    low, high, by = grid_at(
        scale_at + candidate, zero_at + candidate, index, exists, qmin, qmax, ASYMMETRIC, COLUMNS, not CLIPPED
    )
    sums = tl.zeros([SCALES], tl.float64)
    each = tl.cdiv(turns, splits)
    first = (program % splits) * each
    for turn in range(first, tl.minimum(first + each, turns)):
        offsets, masks = tile(
            turn, along1, along2, exists, s1, middle, s2, inner, SCALES, REACH, COLUMNS, FLAT, SHIFT, False
        )
        mask, _, _ = masks
        x = load(x_at + offsets, masks, SHIFT).to(tl.float32)
        number = rounded(quotient(x, by) if CLIPPED else limited_quotient(x, by))
        nearest = limited(number, low, high) if CLIPPED else number
        error = x - nearest * by[0]
        size = error * error if SQUARED else tl.abs(error)
        if CLIPPED:
            size *= tl.where(nearest == number, 1.0, clipped_factor)
        if WEIGHTED:
            size *= load(weights_at + offsets, masks, SHIFT)
        sums += tl.sum(tl.where(mask, size, 0.0), 0 if COLUMNS else 1).to(tl.float64)
    last = splits == 1
    if splits > 1:
        all = tl.num_programs(1).to(tl.int64) * count  # count may be the constant 1
        tl.store(parts_at + (program % splits) * all + candidate + index, sums, mask=exists)
        ticket_at = tickets_at + tl.program_id(1) * (tl.num_programs(0) // splits) + group
        last = draws_last_ticket(ticket_at, splits)
        if last:
            sums = tl.zeros([SCALES], tl.float64)
            for begin in range(0, splits, PARTS):
                split = begin + tl.arange(0, PARTS)
                at = split.to(tl.int64)[:, None] * all + (candidate + index)[None, :]
                there = (split < splits)[:, None] & exists[None, :]
                sums += tl.sum(tl.load(parts_at + at, mask=there, other=0.0, cache_modifier=".cg"), 0)
            tl.store(ticket_at, 0)
    if last:
        tl.store(errors_at + candidate + index, sums, mask=exists)


def candidate_errors(
    x: Tensor, scales: Tensor, zero_points: Tensor | None, block_size: Sequence[int], qmin: int, qmax: int,
    squared: bool, importance: Tensor | None, clipped: float,
) -> Tensor:
    """As ``qtk.ops.candidate_errors.candidate_errors``; norm 2 if ``squared``, else 1."""
    x = x if is_dense(x) else x.contiguous()
    tiling = tiling_of(x, block_size) if x.numel() and x.dtype != torch.float64 else None
    if tiling is None:  # blocks along more than two axes, nothing to sum, or float64
        return reference.candidate_errors(
            x, scales, zero_points, block_size, qmin, qmax, norm=2 if squared else 1, importance=importance,
            clipped=clipped,
        )
    candidates, count = scales.shape
    errors = torch.empty(scales.shape, dtype=torch.float64, device=x.device)
    weights = x if importance is None else torch.empty_like(x, dtype=torch.float32).copy_(importance.expand(x.shape))
    tiling = shifted(tiling, x, weights)
    splits = tiling.splits(max(1, programs(x.device) // max(candidates, 1)))
    parts = errors.new_empty(splits * errors.numel() if splits > 1 else 0)
    steps = scales.to(torch.float32).contiguous()
    with on_device_of(x):
        run(
            errors_kernel, (tiling.groups * splits, candidates),
            x, weights, steps, steps if zero_points is None else zero_points.contiguous(), float(qmin), float(qmax),
            float(clipped), errors, parts, tickets(x.device, tiling.groups * candidates), count, *arguments(tiling),
            splits, ASYMMETRIC=zero_points is not None, WEIGHTED=importance is not None, SQUARED=squared,
            CLIPPED=clipped != 1, PARTS=tiling.parts(splits), **shape(tiling),
        )
    return errors
