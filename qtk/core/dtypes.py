"""Number formats a quantizer can produce. To add one, add a row to the table."""

from __future__ import annotations

from dataclasses import dataclass

from qtk.errors import SpecError
from qtk.registry import nearest


@dataclass(frozen=True, slots=True)
class QDtype:
    """An integer format: ``bits`` wide, two's complement if ``signed``.

    >>> dtype("int4").minimum, dtype("uint8").maximum
    (-8, 255)
    """

    name: str
    bits: int
    signed: bool

    @property
    def minimum(self) -> int:
        return -(1 << (self.bits - 1)) if self.signed else 0

    @property
    def maximum(self) -> int:
        return (1 << (self.bits - 1)) - 1 if self.signed else (1 << self.bits) - 1

    def __str__(self) -> str:
        return self.name


BITS = range(2, 17)
DTYPES = {
    f"{prefix}{bits}": QDtype(f"{prefix}{bits}", bits, signed)
    for prefix, signed in (("int", True), ("uint", False))
    for bits in BITS
}


def dtype(name: str) -> QDtype:
    """The format called ``name``. Raises: SpecError if there is none."""
    if name not in DTYPES:
        raise SpecError(f"unknown dtype {name!r}; {nearest(name, DTYPES)}")
    return DTYPES[name]


def integer(bits: int, *, signed: bool) -> QDtype:
    """The integer format of this width. Raises: SpecError outside 2…16 bits."""
    if isinstance(bits, bool) or not isinstance(bits, int) or bits not in BITS:
        raise SpecError(f"bits must be an int from {BITS.start} to {BITS.stop - 1}, got {bits!r}")
    return DTYPES[f"{'int' if signed else 'uint'}{bits}"]
