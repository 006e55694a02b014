"""What PTX's arithmetic instructions compute, on numpy arrays that hold the value of every thread.

Only what Triton writes for qtk's kernels; anything else is refused by name. float32 is IEEE's, subnormal numbers are
kept but where an instruction says ``.ftz``. Section names are those of NVIDIA's PTX ISA.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import numpy as np

from tests.ptx.kinds import SIGNED, UNSIGNED, Kind, Numbers

Operation = Callable[..., Numbers]

ROUNDINGS: dict[str, Operation] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
COMPARISONS: dict[str, Operation] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge
}
IGNORED = {"rn", "sync", "uni", "ftz"}
"""Modifiers that choose what is done anyway; ``ftz`` is of functions that a subnormal number does not reach."""


class UnknownInstructionError(NotImplementedError):
    """An instruction that is not emulated."""


def operation(name: str, modifiers: tuple[str, ...], kind: Kind) -> Operation:
    """The function of an instruction whose operands and result all have one type.

    Raises: UnknownInstructionError if it is not emulated.
    """
    rest = {each for each in modifiers if each not in IGNORED} - {_written(kind)}
    table = _OF_FLOATS if kind.is_float else _OF_INTEGERS
    key = ".".join([name, *sorted(rest)])
    if key not in table:
        raise UnknownInstructionError(f"{key} of {_written(kind)}")
    return table[key]


def _written(kind: Kind) -> str:
    return f"{kind.letters}{kind.bits}" + (f"x{kind.packed}" if kind.packed > 1 else "")


# Floating-Point Instructions


def fma(a: Numbers, b: Numbers, c: Numbers) -> Numbers:
    """a · b + c rounded once.

    Boldo and Melquiond 2008, Emulation of a FMA and correctly rounded sums: a number rounded to odd with two bits more
    is rounded again as if it were exact. A product of two float32 is exact in float64.
    """
    if a.dtype == np.float32:
        return sum_to_odd(a.astype(np.float64) * b, c.astype(np.float64)).astype(np.float32)
    assert a.dtype == np.float64
    product, below = exact_product(a, b)
    middle, low = exact_sum(c, below)
    high, rest = exact_sum(product, middle)
    return high + sum_to_odd(low, rest)


def exact_sum(a: Numbers, b: Numbers) -> tuple[Numbers, Numbers]:
    """The sum and its error (Knuth)."""
    total = a + b
    virtual = total - a
    return total, (a - (total - virtual)) + (b - virtual)


def exact_product(a: Numbers, b: Numbers) -> tuple[Numbers, Numbers]:
    """The product of float64 and its error (Dekker), for numbers far from the limits of the format."""
    def halves(x: Numbers) -> tuple[Numbers, Numbers]:
        scaled = x * 134217729.0
        upper = scaled - (scaled - x)
        return upper, x - upper

    product = a * b
    (a_upper, a_lower), (b_upper, b_lower) = halves(a), halves(b)
    error = a_lower * b_lower - (((product - a_upper * b_upper) - a_lower * b_upper) - a_upper * b_lower)
    return product, error


def sum_to_odd(a: Numbers, b: Numbers) -> Numbers:
    """a + b in float64, rounded to the neighbour whose last bit is 1 if it is inexact."""
    total, error = exact_sum(a, b)
    bits = total.view(np.int64)
    away = (error > 0) == (total > 0)  # whether the exact sum is farther from 0
    is_even = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
    return np.where(is_even, bits + np.where(away, 1, -1), bits).view(np.float64)


def minimum(a: Numbers, b: Numbers) -> Numbers:
    """The other one of NaN; -0 is less than +0."""
    return np.where((a == 0) & (b == 0), np.where(np.signbit(a), a, b), np.fmin(a, b))


def maximum(a: Numbers, b: Numbers) -> Numbers:
    return np.where((a == 0) & (b == 0), np.where(np.signbit(a), b, a), np.fmax(a, b))


def or_nan(function: Operation) -> Operation:
    def either(a: Numbers, b: Numbers) -> Numbers:
        return np.where(np.isnan(a) | np.isnan(b), np.array(np.nan, a.dtype), function(a, b))

    return either


def smaller_size(a: Numbers, b: Numbers) -> Numbers:
    """min.NaN.xorsign.abs: the smaller of two absolute values, negative if one of the two numbers is."""
    size = or_nan(minimum)(np.abs(a), np.abs(b))
    return np.where(np.signbit(a) ^ np.signbit(b), -size, size)


def of_several(function: Operation) -> Operation:
    """Of two numbers, or on sm_100 of three."""
    return lambda *values: functools.reduce(function, values)


_OF_FLOATS: dict[str, Operation] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "fma": fma, "neg": np.negative,
    "abs": np.abs, "min": of_several(minimum), "max": of_several(maximum), "min.NaN": of_several(or_nan(minimum)),
    "max.NaN": of_several(or_nan(maximum)), "min.NaN.abs.xorsign": smaller_size,
}


# Integer Arithmetic, Logic and Shift Instructions


def quotient(a: Numbers, b: Numbers) -> Numbers:
    """Towards zero."""
    return (a // b + ((a % b != 0) & ((a < 0) != (b < 0)))).astype(a.dtype)


def remainder(a: Numbers, b: Numbers) -> Numbers:
    return a - quotient(a, b) * b


def high(a: Numbers, b: Numbers) -> Numbers:
    assert a.dtype.itemsize == 4
    wide = np.int64 if a.dtype.kind == "i" else np.uint64
    return (a.astype(wide) * b.astype(wide) >> wide(32)).astype(a.dtype)


def shifted_left(a: Numbers, by: Numbers) -> Numbers:
    bits = a.dtype.itemsize * 8
    return np.where(by >= bits, 0, a << np.minimum(by, bits - 1).astype(a.dtype)).astype(a.dtype)


def shifted_right(a: Numbers, by: Numbers) -> Numbers:
    """Signed numbers keep their sign."""
    bits = a.dtype.itemsize * 8
    kept = a >> np.minimum(by, bits - 1).astype(a.dtype)
    return kept if a.dtype.kind == "i" else np.where(by >= bits, 0, kept).astype(a.dtype)


def field_of(a: Numbers, begin: Numbers, length: Numbers) -> Numbers:
    """bfe, which extends the field by its sign if the type is signed."""
    wide = a.view(UNSIGNED[a.dtype.itemsize * 8]).astype(np.uint64)
    begin, length = begin.astype(np.uint64) & np.uint64(0xFF), length.astype(np.uint64) & np.uint64(0xFF)
    assert bool((begin + length <= a.dtype.itemsize * 8).all()), "a field that ends beyond its register"
    found = wide >> begin & (np.uint64(1) << length) - np.uint64(1)
    if a.dtype.kind == "i":
        top = np.uint64(1) << np.maximum(length, np.uint64(1)) - np.uint64(1)
        found = np.where(length > 0, (found ^ top) - top, np.uint64(0))
    return found.astype(UNSIGNED[a.dtype.itemsize * 8]).view(a.dtype)


def permuted(a: Numbers, b: Numbers, selector: Numbers) -> Numbers:
    """prmt: every four bits of the selector choose a byte of both, or its sign eight times."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = np.zeros_like(both)
    for place in range(4):
        choice = selector.astype(np.uint64) >> np.uint64(4 * place) & np.uint64(0xF)
        byte = both >> (choice & np.uint64(7)) * np.uint64(8) & np.uint64(0xFF)
        sign = np.where(byte >= 0x80, np.uint64(0xFF), np.uint64(0))
        result |= np.where(choice >= 8, sign, byte) << np.uint64(8 * place)
    return result.astype(np.uint32)


def ones(a: Numbers) -> Numbers:
    """popc."""
    bytes_ = np.ascontiguousarray(a).view(np.uint8).reshape(len(a), -1)
    return np.unpackbits(bytes_, axis=1).sum(1).astype(np.uint32)


_OF_INTEGERS: dict[str, Operation] = {
    "add": np.add, "sub": np.subtract, "mul.lo": np.multiply, "mul.hi": high, "div": quotient, "rem": remainder,
    "mad.lo": lambda a, b, c: a * b + c, "neg": np.negative, "abs": np.abs, "min": np.minimum, "max": np.maximum,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.bitwise_not, "shl": shifted_left,
    "shr": shifted_right, "bfe": field_of, "prmt": permuted, "popc": ones,
}


# Comparison and Selection Instructions


def comparison(modifiers: tuple[str, ...], kind: Kind) -> Operation:
    """setp. Those that end in u are true of NaN, too.

    Raises: UnknownInstructionError if it is not emulated.
    """
    (name,) = (each for each in modifiers if each not in IGNORED and each != _written(kind))
    match name:
        case "num":
            return lambda a, b: ~(np.isnan(a) | np.isnan(b))
        case "nan":
            return lambda a, b: np.isnan(a) | np.isnan(b)
        case "ne" if kind.is_float:  # numpy's is true of NaN
            return lambda a, b: (a < b) | (a > b)
        case _ if name in COMPARISONS:
            return COMPARISONS[name]
        case _ if name[:-1] in COMPARISONS and name.endswith("u") and kind.is_float:
            return lambda a, b: COMPARISONS[name[:-1]](a, b) | np.isnan(a) | np.isnan(b)
    raise UnknownInstructionError(f"setp.{name}")


# Data Conversion


def conversion(modifiers: tuple[str, ...], into: Kind, source: Kind) -> Operation:
    """cvt, but for the bits that registers are made of: integers saturate, NaN becomes 0.

    Raises: UnknownInstructionError if it is not emulated.
    """
    rest = set(modifiers) - IGNORED - {_written(into), _written(source)}
    integral = [ROUNDINGS[each] for each in rest if each in ROUNDINGS]
    if rest - ROUNDINGS.keys():
        raise UnknownInstructionError(f"cvt.{'.'.join(modifiers)}")
    if into.is_float:
        return lambda values: (integral[0](values) if integral else values).astype(into.dtype)
    if not source.is_float:
        return lambda values: values.astype(into.dtype)

    def to_integer(values: Numbers) -> Numbers:
        limits = np.iinfo(into.dtype)
        rounded = np.nan_to_num(integral[0](values.astype(np.float64)), nan=0.0)
        clamped = np.clip(rounded, float(limits.min), float(limits.max))
        return np.where(clamped >= float(limits.max), limits.max, clamped.astype(into.dtype)).astype(into.dtype)

    return to_integer


def widened(kind: Kind) -> Kind:
    """The type of the result of ``mul.wide`` and ``mad.wide``."""
    assert kind.bits * 2 in SIGNED
    return Kind(kind.letters, kind.bits * 2)
