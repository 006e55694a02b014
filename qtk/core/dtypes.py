"""Number formats a quantizer can produce. To add one, add a row to the table."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

from qtk.errors import SpecError
from qtk.public import public
from qtk.registry import nearest


@public
@dataclass(frozen=True, slots=True)
class QDtype:
    """A number format: ``bits`` wide. Integers are two's complement if ``signed``; floats are signed.

    >>> dtype("int4").minimum, dtype("uint8").maximum, dtype("fp8_e4m3").maximum
    (-8, 255, 448.0)
    """

    name: str
    bits: int
    signed: bool

    @property
    def minimum(self) -> float:
        """The lowest code: a whole number, or the lowest finite float."""
        return -(1 << (self.bits - 1)) if self.signed else 0

    @property
    def maximum(self) -> float:
        """The highest code."""
        return (1 << (self.bits - 1)) - 1 if self.signed else (1 << self.bits) - 1

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class FloatDtype(QDtype):
    """A small float: sign, exponent with bias ``2^(exponent_bits - 1) - 1``, mantissa; subnormals, two zeros.

    Larger magnitudes saturate to ``largest``: infinity is never produced.
    """

    exponent_bits: int
    mantissa_bits: int
    largest: float

    @property
    def minimum(self) -> float:
        return -self.largest

    @property
    def maximum(self) -> float:
        return self.largest


@dataclass(frozen=True, slots=True)
class SumDtype(QDtype):
    """32-bit integers, of which -2³⁰…2³⁰ are used: exact as float32 bounds, and sums of products fit beside them."""

    @property
    def minimum(self) -> float:
        return -(1 << 30)

    @property
    def maximum(self) -> float:
        return 1 << 30


INT32 = SumDtype("int32", 32, True)
"""The format of biases that are added to sums of integer products; no other tensor has it."""

BITS = range(2, 17)
DTYPES: dict[str, QDtype] = {
    f"{prefix}{bits}": QDtype(f"{prefix}{bits}", bits, signed)
    for prefix, signed in (("int", True), ("uint", False))
    for bits in BITS
} | {
    row.name: row
    for row in (  # OCP 8-bit Floating Point Specification 1.0, table 1; OCP Microscaling Formats 1.0, tables 3 to 5
        FloatDtype("fp8_e4m3", 8, True, exponent_bits=4, mantissa_bits=3, largest=448.0),
        FloatDtype("fp8_e5m2", 8, True, exponent_bits=5, mantissa_bits=2, largest=57344.0),
        FloatDtype("fp6_e3m2", 6, True, exponent_bits=3, mantissa_bits=2, largest=28.0),
        FloatDtype("fp6_e2m3", 6, True, exponent_bits=2, mantissa_bits=3, largest=7.5),
        FloatDtype("fp4_e2m1", 4, True, exponent_bits=2, mantissa_bits=1, largest=6.0),
    )
}


@public
def dtype(name: str) -> QDtype:
    """Returns the format called ``name``. Raises: SpecError if there is none."""
    if name == INT32.name:
        return INT32
    if name not in DTYPES:
        raise SpecError(f"unknown dtype {name!r}; {nearest(name, DTYPES)}")
    return DTYPES[name]


@public
def integer(bits: int, *, signed: bool, where: str = "bits") -> QDtype:
    """The integer format of this width; ``where`` it is given, for the message. Raises: SpecError outside 2…16 bits."""
    if isinstance(bits, bool) or not isinstance(bits, Integral) or bits not in BITS:
        raise SpecError(f"{where} must be an int from {BITS.start} to {BITS.stop - 1}, got {bits!r}")
    return DTYPES[f"{'int' if signed else 'uint'}{bits}"]
