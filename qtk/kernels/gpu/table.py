"""One launch for many tensors: a table of addresses, numbers and sizes, in whose rows programs find their tensors.

Where a tile may be any, one tile shape serves all tensors of a launch. What the compiler may know of a size, that it is
1 or divisible by 16, it knows if that holds for all of them.
"""

from __future__ import annotations

import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from qtk.kernels.gpu.launch import programs
from qtk.kernels.gpu.tiles import arguments, is_dense, shape
from qtk.kernels.gpu.tiling import MOST_COLUMNS, Tiling, tiling_of

MOST_TENSORS = 1024
"""Tensors of a launch; every program loads where each of them begins."""

MOST_ELEMENTS = 1 << 27
"""Elements of a tensor that shares a launch; what is larger fills a GPU alone."""

OWN = 9
"""The first columns of the table, of int64, are a kernel's own: addresses and numbers."""

PARTS_AT, TICKETS, FIRST, PROGRAMS = map(tl.constexpr, range(OWN, OWN + 4))
"""Address of partial results, place of the tickets, number of the first program, and how many there are."""

S1, MIDDLE, S2, INNER, STEP1, STEP2, TURNS, SPLITS = map(tl.constexpr, range(OWN + 4, OWN + 12))
FIELDS = tl.constexpr(OWN + 12)


@triton.jit
def tensor_of_program(table_at, tensors, MOST: tl.constexpr):
    """The number of the tensor that this program works on."""
    rows = tl.arange(0, MOST)
    first = tl.load(table_at + rows * FIELDS + FIRST, mask=rows < tensors, other=1 << 40)
    return tl.sum((first <= tl.program_id(0)).to(tl.int32), 0) - 1


@triton.jit
def row_of(table_at, tensor):
    """The row of the tensor of this program, and the program's number among those of the tensor."""
    row_at = table_at + tensor * FIELDS
    return row_at, tl.program_id(0) - tl.load(row_at + FIRST).to(tl.int32)


@triton.jit
def pointer(row_at, FIELD: tl.constexpr, like):
    """An address in the table, as a pointer of the type of ``like``; they are divisible by 16."""
    return tl.multiple_of(tl.load(row_at + FIELD).to(like.dtype), 16)


@triton.jit
def size(row_at, FIELD: tl.constexpr, ONES: tl.constexpr, SIXTEENS: tl.constexpr):
    """A size in the table; a bit of ``ONES`` or ``SIXTEENS`` says that it is 1, or divisible by 16, in all rows."""
    if ONES // 2**FIELD % 2:  # the interpreter shifts no numbers by constants
        return 1
    elif SIXTEENS // 2**FIELD % 2:
        return tl.multiple_of(tl.load(row_at + FIELD).to(tl.int32), 16)
    else:
        return tl.load(row_at + FIELD).to(tl.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Job(ABC):
    """One tensor of a launch."""

    x: Tensor
    tiling: Tiling

    @property
    @abstractmethod
    def own(self) -> tuple[Tensor | int, ...]:
        """The kernel's own columns."""

    @property
    @abstractmethod
    def kind(self) -> tuple[Hashable, ...]:
        """What all tensors of a launch have in common."""

    @property
    def has_parts(self) -> bool:
        """Whether programs that share a scale leave partial results: two floats a scale and program."""
        return False

    @property
    def counters(self) -> int:
        """Tickets beside those of the groups."""
        return 0

    @property
    def splits(self) -> int:
        return self.tiling.splits(programs(self.x.device))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The columns of the table from ``S1`` on."""
        return *arguments(self.tiling), self.splits

    @property
    def known(self) -> dict[str, int]:
        """What the compiler knows of the sizes where the tensor is launched alone."""
        ones = sum(1 << S1.value + place for place, length in enumerate(self.sizes) if length == 1)
        sixteens = sum(1 << S1.value + place for place, length in enumerate(self.sizes) if length % 16 == 0)
        return {"ONES": ones, "SIXTEENS": sixteens}


Jobs = TypeVar("Jobs", bound=Job)


def shared_tiling(x: Tensor, block_size: Sequence[int]) -> Tiling | None:
    """The tiling of a tensor; ``None`` if it is to be launched alone: empty, huge, not dense, float64, deep blocks."""
    dense = 0 < x.numel() < MOST_ELEMENTS and x.dtype != torch.float64 and is_dense(x)
    return tiling_of(x, block_size) if dense else None


def are_aligned(*tensors: Tensor | None) -> bool:
    """Whether the tensors begin at addresses that are divisible by 16."""
    return all(tensor is None or tensor.data_ptr() % 16 == 0 for tensor in tensors)


def launches(jobs: Sequence[Jobs]) -> Iterator[list[Jobs]]:
    """Those that run together, in their order."""
    groups: dict[Hashable, list[Jobs]] = {}
    for job in jobs:
        groups.setdefault(job.kind, []).append(job)
    for group in groups.values():
        for begin in range(0, len(group), MOST_TENSORS):
            yield group[begin : begin + MOST_TENSORS]


def with_one_tile(jobs: Sequence[Jobs]) -> list[Jobs]:
    """The tensors with the tile that has the fewest turns in all."""
    widest, columns = max(job.tiling.s2 for job in jobs), jobs[0].tiling.columns
    scales = 1 << (widest - 1).bit_length()
    elements = max(job.tiling.scales_a_tile * job.tiling.reach for job in jobs)
    best: list[Tiling] = []
    reach = max(1, elements // MOST_COLUMNS) if columns else min(4, elements)
    while reach <= elements:
        tilings = [
            replace(job.tiling, scales_a_tile=min(elements // reach, scales), reach=reach) for job in jobs
        ]
        if not best or _turns(tilings) <= _turns(best):
            best = tilings
        reach *= 2
    return [replace(job, tiling=tiling) for job, tiling in zip(jobs, best, strict=True)]


def _turns(tilings: Sequence[Tiling]) -> int:
    return sum(tiling.groups * tiling.turns for tiling in tilings)


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """The tensors of a launch, which must be alive until it has been made."""

    rows: Tensor
    programs: int
    tickets: int
    constants: dict[str, int | bool]
    rooms: list[Tensor]


def uploaded(jobs: Sequence[Job]) -> Table:
    """The table on the device, and the ``tl.constexpr`` arguments that describe it. Nobody waits for the copy."""
    rows, rooms, ticket, program = [], [], 0, 0
    for job in jobs:
        own = [value if isinstance(value, int) else value.data_ptr() for value in job.own]
        splits = job.splits
        room = job.x.new_empty(job.tiling.partial_results(splits) if job.has_parts else 0, dtype=torch.float32)
        rooms.append(room)
        number = job.tiling.groups * splits
        rows.append((*own, *[0] * (OWN - len(own)), room.data_ptr(), ticket, program, number, *job.sizes))
        program += number
        ticket += job.tiling.groups + job.counters if job.has_parts else 0
    bits = [job.known for job in jobs]
    of_all = {name: functools.reduce(operator.and_, (each[name] for each in bits)) for name in bits[0]}
    constants: dict[str, int | bool] = of_all | shape(jobs[0].tiling)
    constants["MOST"] = max(32, 1 << (len(jobs) - 1).bit_length())
    if jobs[0].has_parts:
        constants["PARTS"] = max(job.tiling.parts(job.splits) for job in jobs)
    device = jobs[0].x.device
    table = torch.empty(len(rows), FIELDS.value, dtype=torch.int64, pin_memory=device.type == "cuda")
    table.copy_(torch.tensor(rows))
    return Table(table.to(device, non_blocking=True), program, ticket, constants, rooms)
