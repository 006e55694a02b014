"""The machine instructions of a compiled kernel, and its main loop.

NVIDIA's SASS as ``cuobjdump -sass`` prints it (``sm_*``), or the assembly that LLVM writes for AMD (``gfx*``). Only
the instructions of the ordinary path count: those that are reached without a basic block that calls a subroutine.
NVIDIA's compiler calls one for quotients near the limits of float32 and for 64-bit integers beyond 32 bits. A call
with a predicate is none of these: that is how it leaves a loop at times.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

SASS = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);", re.MULTILINE)
AMD_BITS = {"byte": 8, "ubyte": 8, "sbyte": 8, "short": 16, "ushort": 16, "sshort": 16, "dword": 32}


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction; ``bits`` of global memory that a thread reads or writes by it, without atomics.

    ``target`` is the index of the instruction to which it may jump. ``falls_through`` is False if the next one never
    follows.
    """

    name: str
    bits: int = 0
    target: int | None = None
    falls_through: bool = True
    calls: bool = False

    @property
    def is_vector_alu(self) -> bool:
        """Whether it takes an issue slot of AMD's vector unit; scalar and memory instructions have their own."""
        return self.name.startswith("v_")

    @property
    def is_spill(self) -> bool:
        """Whether it stores or loads memory of the thread's own."""
        return self.name.startswith(("STL", "LDL", "scratch_"))


def sass(text: str) -> list[Instruction]:
    """The instructions of the one kernel in the output of ``cuobjdump -sass``."""
    found = SASS.findall(text)
    place = {int(address, 16): index for index, (address, *_) in enumerate(found)}
    result = []
    for _, predicate, name, operands in found:
        opcode, *suffixes = name.split(".")
        target = re.search(r"0x([0-9a-f]+)\s*$", operands) if opcode == "BRA" else None
        always = not predicate and (opcode in ("EXIT", "RET") or bool(re.fullmatch(r"\s*0x[0-9a-f]+\s*", operands)))
        result.append(Instruction(
            name, _sass_bits(suffixes) if opcode in ("LDG", "STG") else 0,
            None if target is None else place[int(target[1], 16)],
            not (opcode in ("BRA", "EXIT", "RET") and always), opcode == "CALL" and not predicate,
        ))
    return result


def _sass_bits(suffixes: list[str]) -> int:
    widths = [int(number[1]) for each in suffixes if (number := re.fullmatch(r"[US]?(8|16|32|64|128|256)", each))]
    return widths[0] if widths else 32


def amdgcn(text: str) -> list[Instruction]:
    """The instructions of the one kernel in AMD's assembly."""
    names: list[tuple[str, str]] = []
    labels: dict[str, int] = {}
    for line in text.partition(".Lfunc_begin0:")[2].partition(".Lfunc_end0:")[0].splitlines():
        if label := re.match(r"(\.LBB\w+):", line):
            labels[label[1]] = len(names)
        elif instruction := re.match(r"\s+([a-z]\w+)\s*([^;]*)", line):
            names.append((instruction[1], instruction[2].strip()))
    return [
        Instruction(
            name, _amd_bits(name), labels[operands] if name.startswith(("s_branch", "s_cbranch")) else None,
            name not in ("s_branch", "s_endpgm"), name.startswith("s_swappc"),
        )
        for name, operands in names
    ]


def _amd_bits(name: str) -> int:
    access = re.match(r"(?:global|buffer|flat)_(?:load|store)_([a-z]+?)(?:x(\d))?(?:_|$)", name)
    return AMD_BITS[access[1]] * int(access[2] or 1) if access else 0


def ordinary(code: list[Instruction]) -> set[int]:
    """The indices that are reached from the first instruction without a basic block that calls a subroutine."""
    starts = {0} | {each.target for each in code if each.target is not None}
    starts |= {index + 1 for index, each in enumerate(code) if each.target is not None or not each.falls_through}
    bounds = [*sorted(start for start in starts if start < len(code)), len(code)]
    rare = {
        index for begin, end in itertools.pairwise(bounds)
        if any(each.calls for each in code[begin:end]) for index in range(begin, end)
    }
    reached: set[int] = set()
    to_visit = [0]
    while to_visit:
        index = to_visit.pop()
        while index < len(code) and index not in reached and index not in rare:
            reached.add(index)
            target = code[index].target
            if target is not None:
                to_visit.append(target)
            if not code[index].falls_through:
                break
            index += 1
    return reached


def main_loop(code: list[Instruction], bits: float) -> tuple[list[Instruction], bool]:
    """The first outermost loop that reads or writes at least ``bits`` of global memory a thread, and True.

    Without one, the instructions of the whole kernel, and False. Of a loop inside the loop one pass counts.
    """
    reached = ordinary(code)
    loops = [(each.target, index) for index, each in enumerate(code)
             if index in reached and each.target is not None and each.target <= index]
    for begin, end in sorted(loops, key=lambda loop: (loop[0], -loop[1])):  # outer before inner
        body = [code[index] for index in range(begin, end + 1) if index in reached]
        if sum(each.bits for each in body) >= bits:
            return body, True
    return [code[index] for index in sorted(reached)], False
