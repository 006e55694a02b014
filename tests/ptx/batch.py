"""The state of the programs that run together: their registers by thread, and the memory that they see."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tests.ptx.kinds import UNSIGNED, Bits, Kind, Numbers, constant, numbers, registers
from tests.ptx.memory import GlobalMemory, SharedMemory
from tests.ptx.text import Address, Instruction, Kernel, Operand

POISON = 0xDEADBEEFDEADBEEF
"""What a register holds that nothing was written to."""

Mask: TypeAlias = "NDArray[np.bool_] | None"
"""The threads that carry something out; ``None`` for all."""


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
    active: Mask = None

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

    def write(self, register: Operand, value: Numbers, kind: Kind, mask: Mask) -> None:
        """Writes the threads of the mask that are active."""
        assert isinstance(register, str)
        if register == "_":
            return
        self.write_bits(register, registers(value, kind, self.kernel.bits_of(register)), mask)

    def write_bits(self, register: str, bits: Bits, mask: Mask) -> None:
        if mask is not None:
            if register not in self.values:
                self.values[register] = np.full_like(bits, np.array(POISON, np.uint64).astype(bits.dtype))
            bits = np.where(mask, bits, self.values[register])
        self.values[register] = bits

    def mask_of(self, instruction: Instruction) -> Mask:
        """The threads that carry an instruction out, ``None`` for all."""
        if instruction.predicate is None:
            return self.active
        chosen = self.values[instruction.predicate] ^ instruction.negated
        return chosen if self.active is None else chosen & self.active

    def addresses(self, operand: Operand, space: str) -> NDArray[np.uint64]:
        assert isinstance(operand, Address)
        base = self.read(operand.base, Kind("u", 64 if space == "global" else 32)).astype(np.uint64)
        return base + np.array(operand.offset, np.int64).view(np.uint64)

    def load(self, space: str, threads: NDArray[np.int64], at: NDArray[np.uint64], width: int) -> Bits:
        """Numbers of ``width`` bits, for each of the threads. ``space``: global or shared."""
        if space == "global":
            return self.memory.read(at, width)
        return self.shared.read(self.programs[threads], at, width)

    def store(self, space: str, threads: NDArray[np.int64], at: NDArray[np.uint64], values: Bits) -> None:
        if space == "global":
            self.memory.write(at, values)
        else:
            self.shared.write(self.programs[threads], at, values)

    def reach(self, mask: Mask) -> NDArray[np.int64]:
        """The threads of a mask by number."""
        return np.arange(self.threads) if mask is None else np.flatnonzero(mask)
