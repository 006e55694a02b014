"""What each instruction does to a batch of programs, decided once when the text is read."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.ptx import operations
from tests.ptx.batch import Batch, Mask
from tests.ptx.kinds import UNSIGNED, Kind, kind_of
from tests.ptx.memory import AccessError
from tests.ptx.operations import UnknownInstructionError
from tests.ptx.text import Address, Instruction, Operand

WARP = 32
WORDS = Kind("u", 32)
ATOMICS: dict[str, Callable[..., object]] = {
    "add": lambda old, new: old + new, "exch": lambda old, new: new, "min": min, "max": max,
    "and": lambda old, new: old & new, "or": lambda old, new: old | new,
}

Step = Callable[[Batch, Mask], None]
"""Carries an instruction out for the threads of a mask."""


def name_of(operand: Operand) -> str:
    """A register or label."""
    assert isinstance(operand, str)
    return operand


def step_of(instruction: Instruction) -> Step:
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

        def multiply(batch: Batch, mask: Mask) -> None:
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

    def compute(batch: Batch, mask: Mask) -> None:
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
        name_of(result), function(*(batch.predicate(each) for each in given)), mask
    )


def _move(instruction: Instruction, kinds: list[Kind]) -> Step:
    target, source = instruction.operands
    if not kinds:
        return lambda batch, mask: batch.write_bits(name_of(target), batch.predicate(source), mask)
    kind = Kind("u", kinds[0].bits)

    def move(batch: Batch, mask: Mask) -> None:
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
    names = name_of(targets).split("|")
    function = operations.comparison(instruction.modifiers, kind)

    def compare(batch: Batch, mask: Mask) -> None:
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

    def convert_two(batch: Batch, mask: Mask) -> None:
        low, high = (batch.read(each, source) for each in given[::-1])
        both = np.stack((low, high), 1).reshape(-1).astype(into.dtype)
        batch.write(result, both, into, mask)

    return convert_two


# Memory


def _space(instruction: Instruction) -> str:
    (space,) = {each.partition("_")[0] for each in instruction.modifiers} & {"param", "global", "shared"}
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

    def access(batch: Batch, mask: Mask) -> None:
        reach = batch.reach(mask)
        if not len(reach):
            return
        addresses = batch.addresses(where, space)[reach]
        if bool((addresses % np.uint64(size * len(parts)) != 0).any()):
            raise AccessError(f"a vector of {size * len(parts)} bytes is not aligned")
        for place, part in enumerate(parts):
            at = addresses + np.uint64(place * size)
            if not loads:
                batch.store(space, reach, at, batch.read(part, Kind("u", kind.bits))[reach])
                continue
            values = np.zeros(batch.threads, UNSIGNED[kind.bits])
            values[reach] = batch.load(space, reach, at, kind.bits)
            batch.write(part, values.view(kind.dtype), kind, mask)

    return access


def _atomic(instruction: Instruction, kind: Kind) -> Step:
    """One thread after the other."""
    space = _space(instruction)
    (name,) = (each for each in instruction.modifiers if each in ATOMICS)
    update = ATOMICS[name]
    *results, where, what = instruction.operands

    def change(batch: Batch, mask: Mask) -> None:
        addresses = batch.addresses(where, space)
        values = batch.read(what, kind)
        found = np.zeros(batch.threads, kind.dtype)
        for thread in batch.reach(mask):
            one = np.array([thread])
            found[one] = batch.load(space, one, addresses[one], kind.bits).view(kind.dtype)
            new = np.array([update(found[thread], values[thread])], kind.dtype)
            batch.store(space, one, addresses[one], new.view(UNSIGNED[kind.bits]))
        for result in results:
            batch.write(result, found, kind, mask)

    return change


def _of_warps(instruction: Instruction, kind: Kind) -> Step:
    """shfl.sync and redux.sync, in which all 32 threads of a warp take part."""
    target, source, *given = instruction.operands
    modifiers = instruction.modifiers

    def exchange(batch: Batch, mask: Mask) -> None:
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
        names = name_of(target).split("|")
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

    def move(batch: Batch, mask: Mask) -> None:
        reach = batch.reach(mask)
        assert len(reach) % WARP == 0, f"a part of a warp carries out {instruction.text}"
        addresses = batch.addresses(where, "shared")[reach].reshape(-1, WARP)
        if bool((addresses % np.uint64(16) != 0).any()):
            raise AccessError("the row of a matrix is not aligned")
        lane = np.arange(WARP)
        for matrix, part in enumerate(parts):
            rows, columns = lane[:, None] // 4, lane[:, None] % 4 * 2 + np.arange(2)
            if is_transposed:
                rows, columns = columns, rows + 0 * columns
            rows = rows + 0 * columns
            at = addresses[:, 8 * matrix + rows] + (2 * columns).astype(np.uint64)  # [warps, WARP, 2]
            owners = reach.reshape(-1, WARP)[:, :, None] + 0 * at.astype(np.int64)
            if loads:
                read = batch.load("shared", owners.reshape(-1), at.reshape(-1), 16)
                values = np.zeros(batch.threads, np.uint32)
                values[reach] = read.view(np.uint32)
                batch.write(part, values, WORDS, mask)
            else:
                halves = batch.read(part, WORDS)[reach].view(np.uint16)
                batch.store("shared", owners.reshape(-1), at.reshape(-1), halves)

    return move
