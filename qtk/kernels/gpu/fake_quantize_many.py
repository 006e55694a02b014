"""Fake-quantization of many tensors, and its gradient, in one launch for all that compile alike.

A program finds its tensor in a table of pointers and sizes, then does what it does in the launch of that tensor alone
(``forward_tiles``, ``backward_tiles``). Values and the gradients of tensors are element by element, so that any tile
gives the same bits, and one tile shape serves all tensors of a class of granularity. The gradients of ranges are sums,
whose order depends on the tile and on all that the compiler knows of the sizes: there a launch has the tensors that
have these in common, and knows of their sizes what it knows where they are alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from qtk.core.granularity import WHOLE
from qtk.kernels.gpu import fake_quantize as alone
from qtk.kernels.gpu.fake_quantize import Gradients, backward_tiles, forward_tiles, store_sums
from qtk.kernels.gpu.launch import on_device_of, run, tickets
from qtk.kernels.gpu.table import (
    INNER,
    MIDDLE,
    PARTS_AT,
    S1,
    S2,
    SPLITS,
    STEP1,
    STEP2,
    TICKETS,
    TURNS,
    Job,
    are_aligned,
    launches,
    pointer,
    row_of,
    shared_tiling,
    size,
    tensor_of_program,
    uploaded,
    with_one_tile,
)
from qtk.kernels.gpu.tiles import again, has_tail, lanes, shape
from qtk.kernels.gpu.tiling import fitted
from qtk.numerics.blocks import check_range

X, Y, GRAD, SCALE, ZERO, OF_SCALE, OF_ZERO, QMIN, QMAX = map(tl.constexpr, range(9))
"""The kernels' own columns of the table: addresses, then the range of codes."""


@triton.jit
def many_forward_kernel(
    table_at, tensors, x_at, scale_at, zero_at,
    ASYMMETRIC: tl.constexpr, ONES: tl.constexpr, SIXTEENS: tl.constexpr, MOST: tl.constexpr, SCALES: tl.constexpr,
    REACH: tl.constexpr, COLUMNS: tl.constexpr, FLAT: tl.constexpr, SHIFT: tl.constexpr, TAIL: tl.constexpr,
):
    """``x_at``, ``scale_at``, ``zero_at``: any pointers of the types of those in the table."""
    row_at, program = row_of(table_at, tensor_of_program(table_at, tensors, MOST))
    y_at = pointer(row_at, Y, x_at)
    forward_tiles(
        program, pointer(row_at, X, x_at), y_at, y_at, pointer(row_at, SCALE, scale_at), pointer(row_at, ZERO, zero_at),
        tl.load(row_at + QMIN).to(tl.float32), tl.load(row_at + QMAX).to(tl.float32),
        size(row_at, S1, ONES, SIXTEENS), size(row_at, MIDDLE, ONES, SIXTEENS), size(row_at, S2, ONES, SIXTEENS),
        size(row_at, INNER, ONES, SIXTEENS), size(row_at, STEP1, ONES, SIXTEENS), size(row_at, STEP2, ONES, SIXTEENS),
        size(row_at, TURNS, ONES, SIXTEENS), size(row_at, SPLITS, ONES, SIXTEENS),
        ASYMMETRIC, -1, 0, 0, SCALES, REACH, COLUMNS, FLAT, SHIFT, TAIL,
    )


@triton.jit
def many_backward_kernel(
    table_at, tensors, x_at, g_at, scale_at, zero_at, tickets_at,
    ASYMMETRIC: tl.constexpr, SUMS: tl.constexpr, OF_ZERO_POINT: tl.constexpr, ONES: tl.constexpr,
    SIXTEENS: tl.constexpr, MOST: tl.constexpr, SCALES: tl.constexpr, REACH: tl.constexpr, COLUMNS: tl.constexpr,
    FLAT: tl.constexpr, SHIFT: tl.constexpr, TAIL: tl.constexpr, LANES: tl.constexpr, PARTS: tl.constexpr,
):
    """``x_at``, ``g_at``, ``scale_at``, ``zero_at``: any pointers of the types of those in the table."""
    tensor = tensor_of_program(table_at, tensors, MOST)
    row_at, program = row_of(table_at, tensor)
    sum_of_scale, sum_clipped = backward_tiles(
        program, pointer(row_at, X, x_at), pointer(row_at, GRAD, g_at), pointer(row_at, Y, g_at),
        pointer(row_at, SCALE, scale_at), pointer(row_at, ZERO, zero_at),
        tl.load(row_at + QMIN).to(tl.float32), tl.load(row_at + QMAX).to(tl.float32),
        size(row_at, S1, ONES, SIXTEENS), size(row_at, MIDDLE, ONES, SIXTEENS), size(row_at, S2, ONES, SIXTEENS),
        size(row_at, INNER, ONES, SIXTEENS), size(row_at, STEP1, ONES, SIXTEENS), size(row_at, STEP2, ONES, SIXTEENS),
        size(row_at, TURNS, ONES, SIXTEENS), size(row_at, SPLITS, ONES, SIXTEENS),
        ASYMMETRIC, -1, 0, 0, SUMS, SCALES, REACH, COLUMNS, FLAT, SHIFT, TAIL, LANES,
    )
    if SUMS:  # addresses and sizes are loaded here, so that they take no registers before
        row_at, program = row_of(table_at, again(tensor))
        store_sums(
            program, sum_of_scale, sum_clipped, pointer(row_at, SCALE, scale_at), pointer(row_at, PARTS_AT, scale_at),
            pointer(row_at, OF_SCALE, scale_at), pointer(row_at, OF_ZERO, scale_at),
            tickets_at + tl.load(row_at + TICKETS),
            size(row_at, S2, ONES, SIXTEENS), size(row_at, STEP1, ONES, SIXTEENS), size(row_at, STEP2, ONES, SIXTEENS),
            size(row_at, SPLITS, ONES, SIXTEENS), OF_ZERO_POINT, SCALES, PARTS,
        )


@dataclass(frozen=True, slots=True, eq=False)
class QuantizeJob(Job):
    """Its elements become ``result``: values or gradients, and ``sums`` those of its range."""

    grad: Tensor | None
    scale: Tensor
    zero_point: Tensor | None
    codes: tuple[int, int]
    granularity: str
    result: Tensor
    sums: tuple[Tensor, Tensor] | None = None

    @property
    def zero(self) -> Tensor:
        """The zero points, or what stands for them where there are none."""
        return self.scale if self.zero_point is None else self.zero_point

    @property
    def own(self) -> tuple[Tensor | int, ...]:
        grad, sums = self.x if self.grad is None else self.grad, self.sums or (self.result, self.result)
        return self.x, self.result, grad, self.scale, self.zero, *sums, *self.codes

    @property
    def kind(self) -> tuple[Hashable, ...]:
        tensors = self.grad, self.zero_point
        types = (self.x.device, self.x.dtype, *(None if each is None else each.dtype for each in tensors))
        if self.sums is None:
            return (*types, self.granularity, self.tiling.columns, self.tiling.flat, self.tiling.is_aligned,
                    self.tiling.shift)
        tile = tuple(shape(self.tiling).values())
        return (*types, tile, self.tiling.parts(self.splits), self.sums[1].numel() > 0, *self.known.values())

    @property
    def has_parts(self) -> bool:
        return self.sums is not None


def fake_quantize_many(
    xs: Sequence[Tensor], scales: Sequence[Tensor], zero_points: Sequence[Tensor | None],
    block_sizes: Sequence[Sequence[int]], qmins: Sequence[int], qmaxs: Sequence[int],
) -> list[Tensor]:
    """As ``qtk.ops.fake_quantize_many``. Raises: SpecError if scale or zero point do not fit their tensor."""
    results, jobs = [], []
    for x, *spec in zip(xs, scales, zero_points, block_sizes, qmins, qmaxs, strict=True):
        job = _job(x, None, *spec)
        results.append(alone.fake_quantize(x, *spec) if job is None else job.result)
        jobs += [] if job is None else [job]
    for launched in launches(jobs):
        first, table = launched[0], uploaded(with_one_tile(launched))
        with on_device_of(first.x):
            run(
                many_forward_kernel, (table.programs,),
                table.rows, len(launched), first.x, first.scale, first.zero, ASYMMETRIC=first.zero_point is not None,
                TAIL=has_tail(first.tiling), **table.constants,
            )
    return results


def fake_quantize_many_backward(
    grads: Sequence[Tensor], xs: Sequence[Tensor], scales: Sequence[Tensor], zero_points: Sequence[Tensor | None],
    block_sizes: Sequence[Sequence[int]], qmins: Sequence[int], qmaxs: Sequence[int], wants_scales: Sequence[bool],
    wants_zero_points: Sequence[bool],
) -> list[Gradients]:
    """For each tensor what ``fake_quantize_backward`` returns. Raises: as that function."""
    results, jobs = [], []
    given = zip(grads, xs, scales, zero_points, block_sizes, qmins, qmaxs, wants_scales, wants_zero_points, strict=True)
    for grad, x, scale, zero_point, block_size, qmin, qmax, wants_scale, wants_zero in given:
        spec = scale, zero_point, block_size, qmin, qmax
        job = _job(x, grad, *spec, wants_scale=wants_scale, wants_zero_point=wants_zero)
        if job is None:
            results.append(alone.fake_quantize_backward(grad, x, *spec, wants_scale, wants_zero))
            continue
        nothing = scale.new_empty(0)
        of_scale, of_zero = job.sums or (nothing, nothing)
        results.append((job.result, of_scale if wants_scale else nothing, of_zero))
        jobs.append(job)
    for launched in launches(jobs):
        first, sums = launched[0], launched[0].sums
        table = uploaded(with_one_tile(launched) if sums is None else launched)  # the order of a sum is its tile's
        assert first.grad is not None
        with on_device_of(first.x):
            run(
                many_backward_kernel, (table.programs,),
                table.rows, len(launched), first.x, first.grad, first.scale, first.zero,
                tickets(first.x.device, table.tickets), ASYMMETRIC=first.zero_point is not None,
                SUMS=sums is not None, OF_ZERO_POINT=sums is not None and sums[1].numel() > 0,
                TAIL=has_tail(first.tiling), LANES=lanes(first.tiling, first.x, first.grad),
                **{"PARTS": 1, **table.constants},
            )
    return results


def _job(
    x: Tensor, grad: Tensor | None, scale: Tensor, zero_point: Tensor | None, block_size: Sequence[int],
    qmin: int, qmax: int, *, wants_scale: bool = False, wants_zero_point: bool = False,
) -> QuantizeJob | None:
    """``None`` for a tensor that is to be launched alone."""
    check_range(scale, zero_point, x.shape, block_size)
    tiling = shared_tiling(x, block_size)
    if tiling is None or not are_aligned(x, scale, zero_point):
        return None
    result = torch.empty_like(x, dtype=x.dtype if grad is None else grad.dtype)
    if grad is not None and (grad.stride() != x.stride() or not are_aligned(grad)):
        grad = torch.empty_like(result).copy_(grad)
    sums = None
    if wants_scale or wants_zero_point:
        sums = torch.empty_like(scale), torch.empty_like(scale) if wants_zero_point else scale.new_empty(0)
    tiling = fitted(tiling, x, result if grad is None else grad, result, sums=sums is not None)
    zero = None if zero_point is None else zero_point.contiguous()
    kind = "tensor" if set(block_size) <= {WHOLE} else "channel" if set(block_size) <= {1, WHOLE} else "blocks"
    return QuantizeJob(x, tiling, grad, scale.contiguous(), zero, (qmin, qmax), kind, result, sums)
