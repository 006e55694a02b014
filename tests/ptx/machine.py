"""Runs a PTX kernel: threads in step, one instruction at a time, each on arrays by thread.

Threads whose paths part are run apart: those that are farthest behind go first, so that paths join again. Programs of
one batch run together, batches one after the other, in an order that is drawn. The warps of a batch are drawn into two
teams, of which one runs on until it waits at a barrier: what a kernel gives must not depend on any of this, nor on what
registers and shared memory held before.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tests.ptx.batch import Batch
from tests.ptx.kinds import UNSIGNED, Bits, kind_of
from tests.ptx.memory import AccessError, GlobalMemory, SharedMemory
from tests.ptx.steps import WARP, Step, name_of, step_of
from tests.ptx.text import Instruction, Kernel, parse

BATCH = 16
"""Most programs that run together."""


def run(text: str, arguments: Sequence[torch.Tensor | int | float], grid: Sequence[int], threads: int, shared: int,
        seed: int = 0) -> None:
    """Launches the kernel of a module. ``shared``: bytes of shared memory of a program.

    Raises: AccessError if an access is outside of a tensor or not aligned; UnknownInstructionError.
    """
    kernel, steps = _decoded(text)
    values = [*arguments, *[0] * (len(kernel.parameters) - len(arguments))]  # the last: memory that none of ours needs
    given = {
        name: _packed(value, kind) for (name, kind), value in zip(kernel.parameters.items(), values, strict=True)
    }
    generator = np.random.default_rng(seed)
    programs = generator.permutation(int(np.prod(grid)))
    memory = GlobalMemory(each for each in arguments if isinstance(each, torch.Tensor))
    with np.errstate(all="ignore"):
        for begin in range(0, len(programs), BATCH):
            together = programs[begin : begin + BATCH]
            teams = np.repeat(generator.random(len(together) * threads // WARP) < 0.5, WARP)
            rows = np.repeat(np.arange(len(together)), threads)
            special, shared_memory = _special(together, grid, threads), SharedMemory(len(together), shared)
            _run_batch(Batch(kernel, given, special, rows, teams, memory, shared_memory), steps)


@functools.lru_cache(maxsize=256)
def _decoded(text: str) -> tuple[Kernel, list[Step]]:
    kernel = parse(text)
    return kernel, [step_of(each) for each in kernel.instructions]


def _packed(value: torch.Tensor | int | float, kind: str) -> Bits:
    """An argument as the bits of its type, a tensor by its address."""
    if isinstance(value, torch.Tensor):
        value = value.data_ptr()
    packed = kind_of(kind)
    assert packed is not None, kind
    if packed.is_float:
        return np.array([value], packed.dtype).view(UNSIGNED[packed.bits])
    return np.array([int(value) & (1 << packed.bits) - 1], UNSIGNED[packed.bits])


def _special(batch: NDArray[np.int64], grid: Sequence[int], threads: int) -> dict[str, Bits]:
    """The special registers."""
    lengths = [*grid, 1, 1][:3]
    index = np.unravel_index(batch, lengths[::-1])[::-1]  # x runs fastest
    result = {}
    for axis, place, length in zip("xyz", index, lengths, strict=True):
        result[f"%ctaid.{axis}"] = np.repeat(place.astype(np.uint32), threads)
        result[f"%nctaid.{axis}"] = np.full(len(batch) * threads, length, np.uint32)
    result["%tid.x"] = np.tile(np.arange(threads, dtype=np.uint32), len(batch))
    return result


def _run_batch(batch: Batch, steps: Sequence[Step]) -> None:
    """Runs all threads to the end."""
    code, end = batch.kernel.instructions, len(batch.kernel.instructions)
    places = np.zeros(batch.threads, np.int64)
    waits = np.zeros(batch.threads, bool)  # at a barrier
    while bool((places < end).any()):
        waits &= ~_released(batch, waits, places < end)
        ready = (places < end) & ~waits
        if bool((ready & batch.teams).any()):
            ready &= batch.teams
        place = int(places[ready].min())
        active = ready & (places == place)
        others = places[ready & ~active]
        stop = int(others.min()) if len(others) else end
        batch.active = None if bool(active.all()) else active
        while place < end:
            instruction = code[place]
            if instruction.name == "bra":
                taken = batch.mask_of(instruction)
                taken = np.ones_like(active) if taken is None else taken
                target = batch.kernel.labels[name_of(instruction.operands[0])]
                if bool((taken == active).all()):
                    place = target
                elif bool(taken.any()):
                    places[active], places[taken] = place + 1, target
                    break
                else:
                    place += 1
            elif instruction.name in ("ret", "exit"):
                leaves = batch.mask_of(instruction)
                places[active] = place + 1
                places[active if leaves is None else leaves] = end
                break
            elif instruction.name in ("bar", "barrier"):
                places[active], waits[active] = place + 1, True
                break
            else:
                _carry_out(steps[place], batch, instruction)
                place += 1
            if place >= stop or place == end:
                places[active] = place
                break


def _released(batch: Batch, waits: NDArray[np.bool_], lives: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The threads of those programs of which all threads that are left wait."""
    running = np.bincount(batch.programs, lives & ~waits) > 0
    return waits & ~running[batch.programs]


def _carry_out(step: Step, batch: Batch, instruction: Instruction) -> None:
    try:
        step(batch, batch.mask_of(instruction))
    except AccessError as error:
        raise AccessError(f"{error}, by {instruction.text}") from None
