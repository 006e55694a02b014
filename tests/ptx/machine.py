"""Runs a PTX kernel: threads in step, one instruction at a time, each on arrays by thread.

Threads whose paths part are run apart: those that are farthest behind go first, so that paths join again. Programs of
one batch run together, batches one after the other, in an order that is drawn. The warps of a batch are drawn into two
teams, of which one runs on until it waits at a barrier: what a kernel gives must not depend on any of this, nor on what
registers and shared memory held before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from tests.ptx import operations
from tests.ptx.kinds import UNSIGNED, Bits, Kind, Numbers, constant, kind_of, numbers, registers
from tests.ptx.memory import AccessError, GlobalMemory, SharedMemory
from tests.ptx.operations import UnknownInstructionError
from tests.ptx.text import Address, Instruction, Kernel, Operand, parse

BATCH = 16
"""Most programs that run together."""

WARP = 32
POISON = 0xDEADBEEFDEADBEEF
"""What a register holds that nothing was written to."""

WORDS = Kind("u", 32)
ADDRESSES = Kind("u", 64)
ATOMICS: dict[str, Callable[..., object]] = {
    "add": lambda old, new: old + new, "exch": lambda old, new: new, "min": min, "max": max,
    "and": lambda old, new: old & new, "or": lambda old, new: old | new,
}


@dataclass(slots=True)
class Batch:
    """The state of the programs that run together. ``active``: the threads that run, ``None`` for all."""

    kernel: Kernel
    arguments: dict[str, Bits]
    special: dict[str, Bits]
    programs: NDArray[np.int64]
    teams: NDArray[np.bool_]
    memory: GlobalMemory
    shared: SharedMemory
    values: dict[str, Bits] = field(default_factory=dict)
    active: NDArray[np.bool_] | None = None

    @property
    def threads(self) -> int:
        return len(self.programs)

    def read(self, operand: Operand, kind: Kind) -> Numbers:
        """What a register or number holds for every thread."""
        assert isinstance(operand, str), f"{operand} is no register"
        if operand in self.special:
            return numbers(self.special[operand], kind)
        if operand.startswith("%"):
            if operand not in self.values:
                width = self.kernel.bits_of(operand)
                self.values[operand] = np.full(self.threads, POISON & (1 << width) - 1, UNSIGNED[width])
            return numbers(self.values[operand], kind)
        if operand[0].isdigit() or operand[0] == "-":
            return constant(operand, kind, self.threads)
        return np.zeros(self.threads, kind.dtype)  # global_smem, where shared memory begins

    def predicate(self, operand: Operand) -> NDArray[np.bool_]:
        assert isinstance(operand, str)
        if operand.startswith("%"):
            return self.values[operand]
        return np.full(self.threads, operand not in ("0", "false"))

    def write(self, register: Operand, value: Numbers, kind: Kind, mask: NDArray[np.bool_] | None) -> None:
        """Writes the threads of the mask that are active."""
        assert isinstance(register, str)
        if register == "_":
            return
        self.write_bits(register, registers(value, kind, self.kernel.bits_of(register)), mask)

    def write_bits(self, register: str, bits: Bits, mask: NDArray[np.bool_] | None) -> None:
        if mask is not None:
            if register not in self.values:
                self.values[register] = np.full_like(bits, np.array(POISON, np.uint64).astype(bits.dtype))
            bits = np.where(mask, bits, self.values[register])
        self.values[register] = bits

    def mask_of(self, instruction: Instruction) -> NDArray[np.bool_] | None:
        """The threads that carry an instruction out, ``None`` for all."""
        if instruction.predicate is None:
            return self.active
        chosen = self.values[instruction.predicate] ^ instruction.negated
        return chosen if self.active is None else chosen & self.active

    def addresses(self, operand: Operand, kind: Kind) -> NDArray[np.uint64]:
        assert isinstance(operand, Address)
        base = self.read(operand.base, kind).astype(np.uint64)
        return base + np.array(operand.offset, np.int64).view(np.uint64)


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
    return kernel, [_step(each) for each in kernel.instructions]


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
                target = batch.kernel.labels[_text(instruction.operands[0])]
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


def _text(operand: Operand) -> str:
    assert isinstance(operand, str)
    return operand


Step = Callable[[Batch, "NDArray[np.bool_] | None"], None]
"""Carries an instruction out for the threads of a mask."""


def _carry_out(step: Step, batch: Batch, instruction: Instruction) -> None:
    try:
        step(batch, batch.mask_of(instruction))
    except AccessError as error:
        raise AccessError(f"{error}, by {instruction.text}") from None


def _step(instruction: Instruction) -> Step:
    """The step of an instruction, by its name; what no other function is for is arithmetic."""
    kinds = [kind for each in instruction.modifiers if (kind := kind_of(each)) is not None]
    match instruction.name:
        case "bra" | "ret" | "exit" | "bar" | "barrier" | "membar" | "fence":
            return lambda batch, mask: None  # threads run in step, and memory is one
        case "mov":
            return _move(instruction, kinds)
        case "ld" | "st":
            return _access(instruction, kinds[0])
        case "ldmatrix" | "stmatrix":
            return _matrices(instruction)
        case "atom" | "red":
            return _atomic(instruction, kinds[0])
        case "shfl" | "redux":
            return _of_warps(instruction, kinds[0])
        case "setp":
            return _compare(instruction, kinds[0])
        case "selp":
            return _select(instruction, kinds[0])
        case "cvt":
            return _convert(instruction, kinds)
        case _ if instruction.modifiers[-1] == "pred":
            return _of_predicates(instruction)
        case _:
            return _arithmetic(instruction, kinds[0])


def _arithmetic(instruction: Instruction, kind: Kind) -> Step:
    result, *given = instruction.operands
    taken, made = [kind] * len(given), kind
    modifiers = instruction.modifiers
    if "wide" in modifiers:
        wide = operations.widened(kind)
        name = instruction.name

        def multiply(batch: Batch, mask: NDArray[np.bool_] | None) -> None:
            first, second = (batch.read(each, kind).astype(wide.dtype) for each in given[:2])
            addend = batch.read(given[2], wide) if name == "mad" else np.zeros_like(first)
            batch.write(result, first * second + addend, wide, mask)

        return multiply
    function = operations.operation(instruction.name, modifiers, kind)
    if instruction.name in ("shl", "shr"):
        taken[1] = WORDS
    elif instruction.name == "bfe":
        taken[1:] = [WORDS, WORDS]
    elif instruction.name == "popc":
        made = WORDS

    def compute(batch: Batch, mask: NDArray[np.bool_] | None) -> None:
        values = [batch.read(operand, each) for operand, each in zip(given, taken, strict=True)]
        batch.write(result, function(*values), made, mask)

    return compute


def _of_predicates(instruction: Instruction) -> Step:
    functions = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, "not": np.logical_not}
    if instruction.name not in functions:
        raise UnknownInstructionError(instruction.text)
    result, *given = instruction.operands
    function = functions[instruction.name]
    return lambda batch, mask: batch.write_bits(
        _text(result), function(*(batch.predicate(each) for each in given)), mask
    )


def _move(instruction: Instruction, kinds: list[Kind]) -> Step:
    target, source = instruction.operands
    if not kinds:
        return lambda batch, mask: batch.write_bits(_text(target), batch.predicate(source), mask)
    kind = Kind("u", kinds[0].bits)

    def move(batch: Batch, mask: NDArray[np.bool_] | None) -> None:
        if isinstance(source, tuple):  # several registers become one
            part = Kind("u", kind.bits // len(source))
            parts = np.stack([batch.read(each, part) for each in source], 1)
            batch.write(target, np.ascontiguousarray(parts).view(kind.dtype).reshape(-1), kind, mask)
        elif isinstance(target, tuple):
            part = Kind("u", kind.bits // len(target))
            parts = batch.read(source, kind).view(part.dtype).reshape(-1, len(target))
            for place, each in enumerate(target):
                batch.write(each, np.ascontiguousarray(parts[:, place]), part, mask)
        else:
            batch.write(target, batch.read(source, kind), kind, mask)

    return move


def _compare(instruction: Instruction, kind: Kind) -> Step:
    targets, first, second = instruction.operands
    names = _text(targets).split("|")
    function = operations.comparison(instruction.modifiers, kind)

    def compare(batch: Batch, mask: NDArray[np.bool_] | None) -> None:
        found = function(batch.read(first, kind), batch.read(second, kind)).reshape(-1, kind.packed)
        for place, name in enumerate(names):
            batch.write_bits(name, found[:, place], mask)

    return compare


def _select(instruction: Instruction, kind: Kind) -> Step:
    result, first, second, chooses = instruction.operands
    kind = Kind("u", kind.bits)
    return lambda batch, mask: batch.write(
        result, np.where(batch.predicate(chooses), batch.read(first, kind), batch.read(second, kind)), kind, mask
    )


def _convert(instruction: Instruction, kinds: list[Kind]) -> Step:
    into, source = kinds
    result, *given = instruction.operands
    if into.packed == 1:
        function = operations.conversion(instruction.modifiers, into, source)
        return lambda batch, mask: batch.write(result, function(batch.read(given[0], source)), into, mask)

    def convert_two(batch: Batch, mask: NDArray[np.bool_] | None) -> None:
        low, high = (batch.read(each, source) for each in given[::-1])
        both = np.stack((low, high), 1).reshape(-1).astype(into.dtype)
        batch.write(result, both, into, mask)

    return convert_two


# Memory


def _reach(batch: Batch, mask: NDArray[np.bool_] | None) -> NDArray[np.int64]:
    return np.arange(batch.threads) if mask is None else np.flatnonzero(mask)


def _space(instruction: Instruction) -> str:
    (space,) = (each for each in ("param", "global", "shared", "shared_cta") if each in instruction.modifiers)
    return space


def _access(instruction: Instruction, kind: Kind) -> Step:
    kind = Kind(kind.letters if kind.letters in "su" else "u", kind.bits)
    space = _space(instruction)
    loads = instruction.name == "ld"
    where, what = instruction.operands[::-1] if loads else instruction.operands
    parts = what if isinstance(what, tuple) else (what,)
    if space == "param":
        assert isinstance(where, Address)
        return lambda batch, mask: batch.write(
            what, np.broadcast_to(batch.arguments[where.base].view(kind.dtype), batch.threads), kind, mask
        )
    size = kind.bits // 8

    def access(batch: Batch, mask: NDArray[np.bool_] | None) -> None:
        reach = _reach(batch, mask)
        if not len(reach):
            return
        addresses = batch.addresses(where, ADDRESSES if space == "global" else WORDS)[reach]
        if bool((addresses % np.uint64(size * len(parts)) != 0).any()):
            raise AccessError(f"a vector of {size * len(parts)} bytes is not aligned")
        for place, part in enumerate(parts):
            at = addresses + np.uint64(place * size)
            if not loads:
                values = batch.read(part, Kind("u", kind.bits))[reach]
                if space == "global":
                    batch.memory.write(at, values)
                else:
                    batch.shared.write(batch.programs[reach], at, values)
                continue
            read = (batch.memory.read(at, kind.bits) if space == "global" else
                    batch.shared.read(batch.programs[reach], at, kind.bits))
            values = np.zeros(batch.threads, UNSIGNED[kind.bits])
            values[reach] = read
            batch.write(part, values.view(kind.dtype), kind, mask)

    return access


def _atomic(instruction: Instruction, kind: Kind) -> Step:
    """One thread after the other."""
    space = _space(instruction)
    (name,) = (each for each in instruction.modifiers if each in ATOMICS)
    update = ATOMICS[name]
    *results, where, what = instruction.operands

    def change(batch: Batch, mask: NDArray[np.bool_] | None) -> None:
        reach = _reach(batch, mask)
        addresses = batch.addresses(where, ADDRESSES if space == "global" else WORDS)
        values = batch.read(what, kind)
        found = np.zeros(batch.threads, kind.dtype)
        for thread in reach:
            at = addresses[thread : thread + 1]
            if space == "global":
                old = batch.memory.read(at, kind.bits).view(kind.dtype)
            else:
                old = batch.shared.read(batch.programs[thread : thread + 1], at, kind.bits).view(kind.dtype)
            found[thread] = old[0]
            new = np.array([update(old[0], values[thread])], kind.dtype).view(UNSIGNED[kind.bits])
            if space == "global":
                batch.memory.write(at, new)
            else:
                batch.shared.write(batch.programs[thread : thread + 1], at, new)
        for result in results:
            batch.write(result, found, kind, mask)

    return change


def _of_warps(instruction: Instruction, kind: Kind) -> Step:
    """shfl.sync and redux.sync, in which all 32 threads of a warp take part."""
    target, source, *given = instruction.operands
    modifiers = instruction.modifiers

    def exchange(batch: Batch, mask: NDArray[np.bool_] | None) -> None:
        whole = mask is None or bool((mask.reshape(-1, WARP).all(1) == mask.reshape(-1, WARP).any(1)).all())
        assert whole, f"a part of a warp carries out {instruction.text}"
        values = batch.read(source, kind).reshape(-1, WARP)
        if instruction.name == "redux":
            (name,) = (each for each in modifiers if each in ("add", "min", "max"))
            rest = tuple(each for each in modifiers if each == "NaN")
            function = operations.operation(name, (*rest, modifiers[-1]), kind)
            total = values[:, 0]
            for lane in range(1, WARP):
                total = function(total, values[:, lane])
            batch.write(target, np.repeat(total, WARP), kind, mask)
            return
        lane = np.tile(np.arange(WARP), (len(values), 1))
        by, bound = (batch.read(each, WORDS).reshape(-1, WARP).astype(np.int64) for each in given[:2])
        assert bool((bound >> 8 == 0).all()), "parts of warps are not emulated"
        sources = {"bfly": lane ^ by, "idx": by, "down": lane + by, "up": lane - by}
        (name,) = (each for each in modifiers if each in sources)
        at = sources[name]
        inside = (at >= 0) & (at < WARP)
        names = _text(target).split("|")
        found = np.take_along_axis(values, np.where(inside, at, lane), 1).reshape(-1)
        batch.write(names[0], found, kind, mask)
        for each in names[1:]:
            batch.write_bits(each, inside.reshape(-1), mask)

    return exchange


def _matrices(instruction: Instruction) -> Step:
    """ldmatrix and stmatrix: 8 × 8 of 16 bits, rows at the addresses of eight threads, two elements a thread."""
    loads = instruction.name == "ldmatrix"
    where, what = instruction.operands[::-1] if loads else instruction.operands
    parts = what if isinstance(what, tuple) else (what,)
    is_transposed = "trans" in instruction.modifiers

    def move(batch: Batch, mask: NDArray[np.bool_] | None) -> None:
        reach = _reach(batch, mask)
        assert len(reach) % WARP == 0, f"a part of a warp carries out {instruction.text}"
        addresses = batch.addresses(where, WORDS)[reach].reshape(-1, WARP)
        programs = batch.programs[reach].reshape(-1, WARP)
        if bool((addresses % np.uint64(16) != 0).any()):
            raise AccessError("the row of a matrix is not aligned")
        lane = np.arange(WARP)
        for matrix, part in enumerate(parts):
            rows, columns = lane[:, None] // 4, lane[:, None] % 4 * 2 + np.arange(2)
            if is_transposed:
                rows, columns = columns, rows + 0 * columns
            rows = rows + 0 * columns
            at = addresses[:, 8 * matrix + rows] + (2 * columns).astype(np.uint64)  # [warps, WARP, 2]
            owners = programs[:, lane][:, :, None] + 0 * at.astype(np.int64)
            if loads:
                read = batch.shared.read(owners.reshape(-1), at.reshape(-1), 16)
                values = np.zeros(batch.threads, np.uint32)
                values[reach] = read.view(np.uint32)
                batch.write(part, values, WORDS, mask)
            else:
                halves = batch.read(part, WORDS)[reach].view(np.uint16)
                batch.shared.write(owners.reshape(-1), at.reshape(-1), halves)

    return move


