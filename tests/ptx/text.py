"""PTX as Triton writes it, parsed: one kernel, its parameters, registers and instructions.

Syntax: NVIDIA, Parallel Thread Execution ISA. Debug information and directives that do not change what runs are left
out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

ENTRY = re.compile(r"\.visible \.entry (\w+)\(\s*(.*?)\)\s*(.*?)\{", re.DOTALL)
PARAMETER = re.compile(r"\.param \.(\w+)[^,]*?\b(\w+)(?=,|\s*$)")
REGISTERS = re.compile(r"\.reg \.(\w+)\s+(%\w+?)(?:<\d+>)?;")
STATEMENT = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
SEPARATOR = re.compile(r",(?![^{\[]*[}\]])")


@dataclass(frozen=True, slots=True)
class Address:
    """``[base + offset]``: a register, a parameter or the beginning of shared memory."""

    base: str
    offset: int


Operand = str | Address | tuple[str, ...]
"""A register, number or symbol; an address; a vector."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """``@predicate name.modifiers operands``; ``text`` is the line it was read from."""

    name: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    predicate: str | None
    negated: bool
    text: str


@dataclass(slots=True)
class Kernel:
    """An entry point. ``bits`` of a register by the letters of its name, 1 for a predicate."""

    name: str
    parameters: dict[str, str]
    bits: dict[str, int] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)

    def bits_of(self, register: str) -> int:
        return self.bits[register.rstrip("0123456789")]


def parse(text: str) -> Kernel:
    """The one kernel of a module."""
    entry = ENTRY.search(text)
    assert entry is not None, "the module has no entry point"
    kernel = Kernel(entry[1], {name: kind for kind, name in PARAMETER.findall(entry[2])})
    for line in text[entry.end() : text.index("$L__func_end0:")].splitlines():
        line = line.partition("//")[0].strip()
        if registers := REGISTERS.match(line):
            kernel.bits[registers[2]] = 1 if registers[1] == "pred" else int(registers[1].lstrip("bfus"))
        elif label := re.match(r"(\$?\w+):$", line):
            kernel.labels[label[1]] = len(kernel.instructions)
        elif line and not line.startswith((".", "{", "}")):
            kernel.instructions.append(_instruction(line))
    return kernel


def _instruction(line: str) -> Instruction:
    assert line.endswith(";"), f"an instruction on several lines: {line}"
    statement = STATEMENT.fullmatch(line.rstrip(";").strip())
    assert statement is not None, f"no instruction: {line}"
    negated, predicate, opcode, operands = statement.groups()
    name, *modifiers = opcode.replace("::", "_").split(".")
    parsed = tuple(_operand(each.strip()) for each in SEPARATOR.split(operands) if each.strip())
    return Instruction(name, tuple(modifiers), parsed, predicate, bool(negated), line)


def _operand(text: str) -> Operand:
    if text.startswith("{"):
        return tuple(each.strip() for each in text.strip("{}").split(","))
    if text.startswith("["):
        base, _, offset = text.strip("[]").replace(" ", "").partition("+")
        return Address(base, int(offset or 0))
    return text
