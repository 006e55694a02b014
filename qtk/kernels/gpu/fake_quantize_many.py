"""Fake-quantization of many tensors, and its gradient, in one launch for all that compile alike.

A program finds its tensor in a table of pointers and sizes, then does what it does in the launch of that tensor alone
(``forward_tiles``, ``backward_tiles``). Values and the gradients of tensors are element by element, so that any tile
gives the same bits, and one tile shape serves all tensors of a class of granularity. The gradients of ranges are sums,
whose order depends on the tile and on all that the compiler knows of the sizes: there a launch has the tensors that
have these in common, and knows of their sizes what it knows where they are alone.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from qtk.core.granularity import WHOLE
from qtk.kernels.gpu import fake_quantize as alone
from qtk.kernels.gpu.fake_quantize import Gradients, backward_tiles, forward_tiles, store_sums
from qtk.kernels.gpu.launch import on_device_of, programs, tickets
from qtk.kernels.gpu.tiles import arguments, has_tail, is_dense, shape
from qtk.kernels.gpu.tiling import TILE, Tiling, tiling_of
from qtk.numerics.blocks import check_range

MOST_TENSORS = 1024
"""Tensors of a launch; every program loads where each of them begins."""

MOST_ELEMENTS = 1 << 27
"""Elements of a tensor that shares a launch; what is larger fills a GPU alone."""

FIELDS = tl.constexpr(21)
X, Y, GRAD, SCALE, ZERO, OF_SCALE, OF_ZERO, PARTS_AT, TICKETS, QMIN, QMAX, FIRST = map(tl.constexpr, range(12))
"""The columns of the table, of int64: addresses, then the place of the tickets, the range, the first program, and the
sizes. A bit of ``ONES`` or ``SIXTEENS`` says that a size is 1, or divisible by 16, for all tensors of the launch.
"""
COUNT, S1, MIDDLE, S2, INNER, STEP1, STEP2, TURNS, SPLITS = map(tl.constexpr, range(12, 21))


@triton.jit
def row_of(table_at, tensors, MOST: tl.constexpr):
    """The row of the tensor of this program, and the program's number among those of the tensor."""
    rows = tl.arange(0, MOST)
    first = tl.load(table_at + rows * FIELDS + FIRST, mask=rows < tensors, other=1 << 40)
    row_at = table_at + (tl.sum((first <= tl.program_id(0)).to(tl.int32), 0) - 1) * FIELDS
    return row_at, tl.program_id(0) - tl.load(row_at + FIRST).to(tl.int32)


@triton.jit
def pointer(row_at, FIELD: tl.constexpr, like):
    """An address in the table, as a pointer of the type of ``like``; they are divisible by 16."""
    return tl.multiple_of(tl.load(row_at + FIELD).to(like.dtype), 16)


@triton.jit
def size(row_at, FIELD: tl.constexpr, ONES: tl.constexpr, SIXTEENS: tl.constexpr):
    """A size in the table, with what is known of it in all rows."""
    if ONES // 2**FIELD % 2:  # the interpreter shifts no numbers by constants
        return 1
    elif SIXTEENS // 2**FIELD % 2:
        return tl.multiple_of(tl.load(row_at + FIELD).to(tl.int32), 16)
    else:
        return tl.load(row_at + FIELD).to(tl.int32)


@triton.jit
def many_forward_kernel(
    table_at, tensors, x_at, scale_at, zero_at,
    ASYMMETRIC: tl.constexpr, ONES: tl.constexpr, SIXTEENS: tl.constexpr, MOST: tl.constexpr, SCALES: tl.constexpr,
    REACH: tl.constexpr, COLUMNS: tl.constexpr, FLAT: tl.constexpr, TAIL: tl.constexpr,
):
    """``x_at``, ``scale_at``, ``zero_at``: any pointers of the types of those in the table."""
    row_at, program = row_of(table_at, tensors, MOST)
    y_at = pointer(row_at, Y, x_at)
    forward_tiles(
        program, pointer(row_at, X, x_at), y_at, y_at, pointer(row_at, SCALE, scale_at), pointer(row_at, ZERO, zero_at),
        tl.load(row_at + QMIN).to(tl.float32), tl.load(row_at + QMAX).to(tl.float32),
        size(row_at, S1, ONES, SIXTEENS), size(row_at, MIDDLE, ONES, SIXTEENS), size(row_at, S2, ONES, SIXTEENS),
        size(row_at, INNER, ONES, SIXTEENS), size(row_at, STEP1, ONES, SIXTEENS), size(row_at, STEP2, ONES, SIXTEENS),
        size(row_at, TURNS, ONES, SIXTEENS), size(row_at, SPLITS, ONES, SIXTEENS),
        ASYMMETRIC, -1, 0, 0, SCALES, REACH, COLUMNS, FLAT, TAIL,
    )


@triton.jit
def many_backward_kernel(
    table_at, tensors, x_at, g_at, scale_at, zero_at, tickets_at,
    ASYMMETRIC: tl.constexpr, SUMS: tl.constexpr, OF_ZERO_POINT: tl.constexpr, ONES: tl.constexpr,
    SIXTEENS: tl.constexpr, MOST: tl.constexpr, SCALES: tl.constexpr, REACH: tl.constexpr, COLUMNS: tl.constexpr,
    FLAT: tl.constexpr, TAIL: tl.constexpr, PARTS: tl.constexpr,
):
    """``x_at``, ``g_at``, ``scale_at``, ``zero_at``: any pointers of the types of those in the table."""
    row_at, program = row_of(table_at, tensors, MOST)
    s2, splits = size(row_at, S2, ONES, SIXTEENS), size(row_at, SPLITS, ONES, SIXTEENS)
    step1, step2 = size(row_at, STEP1, ONES, SIXTEENS), size(row_at, STEP2, ONES, SIXTEENS)
    given, sum_of_scale, sum_clipped = backward_tiles(
        program, pointer(row_at, X, x_at), pointer(row_at, GRAD, g_at), pointer(row_at, Y, g_at),
        pointer(row_at, SCALE, scale_at), pointer(row_at, ZERO, zero_at),
        tl.load(row_at + QMIN).to(tl.float32), tl.load(row_at + QMAX).to(tl.float32),
        size(row_at, S1, ONES, SIXTEENS), size(row_at, MIDDLE, ONES, SIXTEENS), s2,
        size(row_at, INNER, ONES, SIXTEENS), step1, step2, size(row_at, TURNS, ONES, SIXTEENS), splits,
        ASYMMETRIC, -1, 0, 0, SUMS, SCALES, REACH, COLUMNS, FLAT, TAIL,
    )
    if SUMS:  # the addresses are loaded here, so that they take no registers before
        store_sums(
            program, given, sum_of_scale, sum_clipped, pointer(row_at, PARTS_AT, scale_at),
            pointer(row_at, OF_SCALE, scale_at), pointer(row_at, OF_ZERO, scale_at),
            tickets_at + tl.load(row_at + TICKETS), size(row_at, COUNT, ONES, SIXTEENS), s2, step1, step2, splits,
            OF_ZERO_POINT, SCALES, PARTS,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One tensor of a launch; its elements become ``result``: values or gradients, and ``sums`` those of its range."""

    x: Tensor
    grad: Tensor | None
    scale: Tensor
    zero_point: Tensor | None
    codes: tuple[int, int]
    tiling: Tiling
    granularity: str
    result: Tensor
    sums: tuple[Tensor, Tensor] | None = None

    @property
    def splits(self) -> int:
        return self.tiling.splits(programs(self.x.device))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The columns of the table from ``COUNT`` on."""
        return self.scale.numel(), *arguments(self.tiling), self.splits

    @property
    def known(self) -> dict[str, int]:
        """What the compiler knows of the sizes where the tensor is launched alone."""
        ones = sum(1 << COUNT.value + place for place, length in enumerate(self.sizes) if length == 1)
        sixteens = sum(1 << COUNT.value + place for place, length in enumerate(self.sizes) if length % 16 == 0)
        return {"ONES": ones, "SIXTEENS": sixteens}

    @property
    def kind(self) -> tuple[Hashable, ...]:
        """What all tensors of a launch have in common."""
        tensors = self.grad, self.zero_point
        types = (self.x.device, self.x.dtype, *(None if each is None else each.dtype for each in tensors))
        if self.sums is None:
            return (*types, self.granularity, self.tiling.columns, self.tiling.flat, self.is_aligned)
        tile = tuple(shape(self.tiling).values())
        return (*types, tile, self.tiling.parts(self.splits), self.sums[1].numel() > 0, *self.known.values())

    @property
    def is_aligned(self) -> bool:
        """Whether what is contiguous in memory begins at multiples of 16 elements."""
        return (self.tiling.s2 if self.tiling.columns else self.tiling.inner) % 16 == 0


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
    for launched in _launches(jobs):
        first, zero = launched[0], launched[0].zero_point
        table, known = _with_one_tile(launched)
        with on_device_of(first.x):
            many_forward_kernel[(_programs(table),)](
                _uploaded(table, []), len(table), first.x, first.scale, first.scale if zero is None else zero,
                ASYMMETRIC=zero is not None, MOST=_most(table), TAIL=has_tail(table[0].tiling), **known,
                **shape(table[0].tiling),
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
    for launched in _launches(jobs):
        first, zero, sums = launched[0], launched[0].zero_point, launched[0].sums
        table, known = _with_one_tile(launched) if sums is None else (launched, first.known)
        parts = [] if sums is None else [_room(job) for job in table]
        assert first.grad is not None
        with on_device_of(first.x):
            many_backward_kernel[(_programs(table),)](
                _uploaded(table, parts), len(table), first.x, first.grad, first.scale,
                first.scale if zero is None else zero,
                tickets(first.x.device, 0 if sums is None else sum(job.tiling.groups for job in table)),
                ASYMMETRIC=zero is not None, SUMS=sums is not None,
                OF_ZERO_POINT=sums is not None and sums[1].numel() > 0, MOST=_most(table), **known,
                TAIL=sums is None and has_tail(table[0].tiling), PARTS=table[0].tiling.parts(table[0].splits),
                **shape(table[0].tiling),
            )
    return results


def _job(
    x: Tensor, grad: Tensor | None, scale: Tensor, zero_point: Tensor | None, block_size: Sequence[int],
    qmin: int, qmax: int, *, wants_scale: bool = False, wants_zero_point: bool = False,
) -> Job | None:
    """``None`` for a tensor that is to be launched alone: not dense, not aligned, empty, huge, of deep blocks."""
    check_range(scale, zero_point, x.shape, block_size)
    dense = 0 < x.numel() < MOST_ELEMENTS and x.dtype != torch.float64 and is_dense(x)
    tiling = tiling_of(x, block_size) if dense else None
    if tiling is None or not _are_aligned(x, scale, zero_point):
        return None
    result = torch.empty_like(x, dtype=x.dtype if grad is None else grad.dtype)
    if grad is not None and (grad.stride() != x.stride() or not _are_aligned(grad)):
        grad = torch.empty_like(result).copy_(grad)
    sums = None
    if wants_scale or wants_zero_point:
        sums = torch.empty_like(scale), torch.empty_like(scale) if wants_zero_point else scale.new_empty(0)
    zero = None if zero_point is None else zero_point.contiguous()
    kind = "tensor" if set(block_size) <= {WHOLE} else "channel" if set(block_size) <= {1, WHOLE} else "blocks"
    return Job(x, grad, scale.contiguous(), zero, (qmin, qmax), tiling, kind, result, sums)


def _are_aligned(*tensors: Tensor | None) -> bool:
    return all(tensor is None or tensor.data_ptr() % 16 == 0 for tensor in tensors)


def _launches(jobs: Sequence[Job]) -> Iterator[list[Job]]:
    """Those that run together, in their order."""
    groups: dict[Hashable, list[Job]] = {}
    for job in jobs:
        groups.setdefault(job.kind, []).append(job)
    for group in groups.values():
        for begin in range(0, len(group), MOST_TENSORS):
            yield group[begin : begin + MOST_TENSORS]


def _with_one_tile(jobs: Sequence[Job]) -> tuple[list[Job], dict[str, int]]:
    """The tensors with the tile that has the fewest turns in all, and what is known of their sizes."""
    widest, columns = max(job.tiling.s2 for job in jobs), jobs[0].tiling.columns
    scales = 1 << (widest - 1).bit_length()
    best: list[Tiling] = []
    for power in range(5 if columns else 2, TILE.bit_length()):
        reach = 1 << power
        tilings = [
            replace(job.tiling, scales_a_tile=min(TILE // reach, scales), reach=reach) for job in jobs
        ]
        if not best or _turns(tilings) <= _turns(best):
            best = tilings
    table = [replace(job, tiling=tiling) for job, tiling in zip(jobs, best, strict=True)]
    known = [job.known for job in table]
    return table, {name: functools.reduce(operator.and_, (each[name] for each in known)) for name in known[0]}


def _turns(tilings: Sequence[Tiling]) -> int:
    return sum(tiling.groups * tiling.turns for tiling in tilings)


def _room(job: Job) -> Tensor:
    """For the partial sums of the programs that share a scale."""
    splits = job.splits
    return job.scale.new_empty(2 * splits * job.scale.numel() if splits > 1 else 0)


def _uploaded(table: Sequence[Job], parts: Sequence[Tensor]) -> Tensor:
    """The table, on the device."""
    rows, ticket, program = [], 0, 0
    for place, job in enumerate(table):
        sums = job.sums or (job.result, job.result)
        pointers = (job.x, job.result, job.x if job.grad is None else job.grad, job.scale,
                    job.scale if job.zero_point is None else job.zero_point, *sums,
                    parts[place] if parts else job.result)
        rows.append((*(tensor.data_ptr() for tensor in pointers), ticket, *job.codes, program, *job.sizes))
        ticket += job.tiling.groups if parts else 0
        program += job.tiling.groups * job.splits
    return torch.tensor(rows, dtype=torch.int64).to(table[0].x.device, non_blocking=True)


def _programs(table: Sequence[Job]) -> int:
    return sum(job.tiling.groups * job.splits for job in table)


def _most(table: Sequence[Job]) -> int:
    return max(32, 1 << (len(table) - 1).bit_length())
