"""PTX's types as numpy's: how bits of a register are read as numbers, and numbers written as bits."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Bits: TypeAlias = NDArray[Any]
"""What registers hold: unsigned integers of their width, one for each thread."""

Numbers: TypeAlias = NDArray[Any]
"""Numbers of a type of PTX."""

DTYPES = {"f16": np.float16, "f32": np.float32, "f64": np.float64, "pred": np.bool_}
UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}


@dataclass(frozen=True, slots=True)
class Kind:
    """A type of PTX: letters, bits of a number, and how many numbers of it one register holds."""

    letters: str
    bits: int
    packed: int = 1

    @property
    def is_float(self) -> bool:
        return self.letters in ("f", "bf")

    @property
    def dtype(self) -> np.dtype:
        """Of the numbers; of bfloat16, which numpy lacks, float32."""
        if self.letters == "bf":
            return np.dtype(np.float32)
        if self.letters == "f":
            return np.dtype(DTYPES[f"f{self.bits}"])
        return np.dtype((SIGNED if self.letters == "s" else UNSIGNED)[self.bits])


def kind_of(modifier: str) -> Kind | None:
    """The type that a modifier of an instruction names, if it names one."""
    found = re.fullmatch(r"(bf|[bsuf])(8|16|32|64)(?:x(2))?", modifier)
    return Kind(found[1], int(found[2]), int(found[3] or 1)) if found else None


def numbers(bits: Bits, kind: Kind) -> Numbers:
    """The numbers in registers, of which a narrower type takes the low bits; of packed ones, one after the other."""
    width = kind.bits * kind.packed
    if bits.dtype.itemsize * 8 > width:
        bits = bits.astype(UNSIGNED[width])
    assert bits.dtype.itemsize * 8 == width, f"{kind} in a register of {bits.dtype}"
    if kind.letters == "bf":
        return (bits.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return bits.view(kind.dtype)


def registers(values: Numbers, kind: Kind, width: int) -> Bits:
    """Numbers of a type as bits of registers, a narrower one extended: signed numbers by their sign."""
    if kind.letters == "bf":
        values = nearest_bfloat16(values.astype(np.float32))
    values = np.ascontiguousarray(values)
    if kind.bits * kind.packed == width:
        return values.view(UNSIGNED[width])
    assert kind.bits < width, f"{kind} into a register of {width} bits"
    assert not kind.is_float, f"{kind} into a register of {width} bits"
    return values.astype((SIGNED if kind.letters == "s" else UNSIGNED)[width]).view(UNSIGNED[width])


def nearest_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Bits of the nearest, ties to even; NaN becomes the one that PTX writes."""
    bits = values.view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FFF), nearest).astype(np.uint16)


def constant(text: str, kind: Kind, count: int) -> Numbers:
    """A number that stands in the text, ``count`` times."""
    if text.startswith(("0f", "0d")):
        value = int(text[2:], 16)
    else:
        value = int(text.rstrip("U"), 0) & (1 << kind.bits * kind.packed) - 1
    return numbers(np.full(count, value, UNSIGNED[kind.bits * kind.packed]), kind)
