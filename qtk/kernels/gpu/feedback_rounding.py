"""Rounding with error feedback in one launch; formula in ``qtk.numerics.feedback_rounding``.

A program has some rows, whose numbers stay in registers. It rounds one column after the other and adds each error to
the columns that wait.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qtk.kernels.gpu.codes import effective_scale, rounded
from qtk.kernels.gpu.division import limited
from qtk.kernels.gpu.launch import on_device_of, run

ROWS = 16
"""Rows of a program."""
MOST_COLUMNS = 256
"""Columns whose numbers fit the registers."""


@triton.jit
def feedback_kernel(
    target_at, change_at, feedback_at, scale_at, zero_at, qmin, qmax, rows, columns, group_of_target, row_of_target,
    group_of_change, row_of_change, group_of_scale, row_of_scale, column_of_scale,
    ASYMMETRIC: tl.constexpr, BACKWARDS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    group = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, WIDTH)
    exists = row < rows
    mask = exists[:, None] & (column < columns)[None, :]
    targets = target_at + group * group_of_target + row[:, None] * row_of_target + column[None, :]
    changes = change_at + group * group_of_change + row[:, None] * row_of_change + column[None, :]
    scales = group * group_of_scale + row * row_of_scale
    factors = feedback_at + group * columns * columns + column * columns
    target = tl.load(targets, mask=mask, other=0.0)
    change = tl.load(changes, mask=mask, other=0.0)
    for step in range(columns):
        here = step
        if BACKWARDS:
            here = columns - 1 - step
        is_here = (column == here)[None, :]
        x = tl.sum(tl.where(is_here, target, 0.0), 1).to(tl.float32)
        start = tl.sum(tl.where(is_here, change, 0.0), 1)
        own = scales + here * column_of_scale
        scale = effective_scale(tl.load(scale_at + own, mask=exists, other=1.0))
        zero = tl.zeros_like(scale)
        if ASYMMETRIC:
            zero = tl.load(zero_at + own, mask=exists, other=0).to(tl.float32)
        nearest = (rounded(limited(tl.div_rn(x, scale), qmin - zero, qmax - zero)) * scale).to(target.dtype)
        moved = start - nearest
        waits = (column < here) if BACKWARDS else (column > here)
        factor = tl.load(factors + here, mask=waits & (column < columns), other=0.0)
        target = tl.where(waits[None, :], target + moved[:, None] * factor[None, :], target)
        target = tl.where(is_here, nearest[:, None], target)
        change = tl.where(is_here, moved[:, None], change)
    tl.store(targets, target, mask=mask)
    tl.store(changes, change, mask=mask)


def round_with_feedback_(
    target: Tensor, change: Tensor, feedback: Tensor, scale: Tensor, zero_point: Tensor | None, qmin: int, qmax: int,
    backwards: bool,
) -> None:
    """As ``qtk.ops.feedback_rounding.round_with_feedback_``, for at most ``MOST_COLUMNS`` columns."""
    groups, rows, columns = target.shape
    if not target.numel():
        return
    if zero_point is not None and zero_point.stride() != scale.stride():
        scale, zero_point = scale.contiguous(), zero_point.contiguous()
    zeros = scale if zero_point is None else zero_point.to(torch.int32)
    with on_device_of(target):
        run(
            feedback_kernel, (triton.cdiv(rows, ROWS), groups),
            target, change, feedback.contiguous(), scale, zeros, float(qmin), float(qmax), rows, columns,
            *target.stride()[:2], *change.stride()[:2], *scale.stride(),
            ASYMMETRIC=zero_point is not None, BACKWARDS=backwards, ROWS=ROWS,
            WIDTH=max(16, triton.next_power_of_2(columns)),
        )
