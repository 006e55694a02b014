"""The arithmetic of the emulator against exact fractions, Python's integers and torch."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.ptx import operations
from tests.ptx.kinds import Kind, constant, kind_of, numbers, registers
from tests.ptx.operations import UnknownInstructionError, comparison, conversion, operation

F32, S32, U32 = Kind("f", 32), Kind("s", 32), Kind("u", 32)


def floats(kind=np.float32, count=4000):
    """Numbers of every size, and what is no ordinary number."""
    generator = np.random.default_rng(0)
    bits = generator.integers(0, 1 << 8 * np.dtype(kind).itemsize, count, dtype=np.uint64)
    found = bits.astype({4: np.uint32, 8: np.uint64}[np.dtype(kind).itemsize]).view(kind)
    return np.concatenate([found, np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 0.5, 1.5, 2.5], kind)])


def nearest(value: Fraction) -> np.float32:
    """The float32 that is nearest to a number, ties to even, by comparing neighbours."""
    guess = np.float32(float(value))
    around = [guess, np.nextafter(guess, np.float32(np.inf)), np.nextafter(guess, np.float32(-np.inf))]
    finite = [each for each in around if np.isfinite(each)]
    return min(finite, key=lambda each: (abs(Fraction(float(each)) - value), int(each.view(np.uint32)) & 1))


def test_a_fused_product_and_sum_is_rounded_once():
    generator = np.random.default_rng(1)
    a, b = (generator.standard_normal(3000).astype(np.float32) for _ in range(2))
    c = (-a * b * (1 + generator.integers(-3, 4, 3000) * np.float32(2**-24))).astype(np.float32)  # most of it cancels
    c[::3] = generator.standard_normal(1000).astype(np.float32) * np.float32(2.0**-20)
    exact = [Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)) for x, y, z in zip(a, b, c, strict=True)]
    assert np.array_equal(operations.fma(a, b, c), np.array([nearest(each) for each in exact]))
    assert not np.array_equal(a * b + c, operations.fma(a, b, c))


def test_so_is_one_of_float64():
    generator = np.random.default_rng(1)
    a, b, c = generator.standard_normal((3, 2000))
    c[::2] = -(a * b)[::2]
    numbers_ = zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    exact = [Fraction(x) * Fraction(y) + Fraction(z) for x, y, z in numbers_]
    assert operations.fma(a, b, c).tolist() == [float(each) for each in exact]  # Python rounds a fraction once


@pytest.mark.parametrize("name", ["minimum", "maximum"])
def test_the_lower_and_the_higher_number(name):
    a, b = floats(), floats()[::-1].copy()
    zero = np.array([0.0, -0.0], np.float32)
    found = getattr(operations, name)(a, b)
    chooses = min if name == "minimum" else max
    for x, y, own in zip(a.tolist(), b.tolist(), found.tolist(), strict=True):
        expected = y if x != x else x if y != y else chooses(x, y)
        assert own == expected or (own != own and expected != expected)
    assert np.signbit(getattr(operations, name)(zero, zero[::-1].copy())).all() == (name == "minimum")
    both = operations.or_nan(getattr(operations, name))(a, b)
    assert np.array_equal(np.isnan(both), np.isnan(a) | np.isnan(b))


@pytest.mark.parametrize(("letters", "kind"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_half_precision_is_rounded_as_by_torch(letters, kind):
    values = floats()
    own, expected = kind_of(letters), torch.from_numpy(values).to(kind)
    with np.errstate(all="ignore"):
        bits = registers(conversion(("rn", letters, "f32"), own, F32)(values), own, 16)
        back = numbers(bits, own).astype(np.float32)
    same = (back == expected.float().numpy()) & (np.signbit(back) == np.signbit(expected.float().numpy()))
    assert bool((same | (np.isnan(back) & np.isnan(values))).all())


def test_floats_become_integers_of_their_range():
    values = np.array([1.5, -1.5, 3e9, -3e9, np.inf, -np.inf, np.nan, 0.4], np.float32)
    assert conversion(("rzi", "s32", "f32"), S32, F32)(values).tolist() == [
        1, -1, 2**31 - 1, -(2**31), 2**31 - 1, -(2**31), 0, 0]
    assert conversion(("rni", "u32", "f32"), U32, F32)(values).tolist()[:4] == [2, 0, 3000000000, 0]
    assert conversion(("rmi", "ftz", "f32", "f32"), F32, F32)(values).tolist()[:2] == [1.0, -2.0]


def test_integers_as_python_computes_them():
    generator = np.random.default_rng(2)
    bits = generator.integers(0, 1 << 32, (3, 2000), dtype=np.uint64).astype(np.uint32)
    bits[1, ::3], bits[2] = bits[1, ::3] % 40 + 1, bits[2] % 40
    for kind in (S32, U32):
        a, b, count = bits[0].view(kind.dtype), bits[1].view(kind.dtype), bits[2]
        for x, y, by, *found in zip(
            a.tolist(), b.tolist(), count.tolist(), operation("div", ("s32",) if kind is S32 else ("u32",), kind)(a, b),
            operation("rem", ("s32",) if kind is S32 else ("u32",), kind)(a, b), operations.high(a, b),
            operations.shifted_left(a, count), operations.shifted_right(a, count), strict=True,
        ):
            towards_zero = abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)
            expected = towards_zero, x - towards_zero * y, x * y >> 32, x << by, x >> by
            mask = (1 << 32) - 1
            assert [int(each) & mask for each in found] == [each & mask for each in expected], (x, y, by)


def test_bits_of_a_register():
    word = np.array([0x80FF1234], np.uint32)
    assert operations.permuted(word, word, np.array([0x7770], np.uint32)).tolist() == [0x80808034]
    assert operations.permuted(word, ~word, np.array([0x4B0A], np.uint32)).tolist() == [0xCBFF34FF]
    begin, length = np.array([8], np.uint32), np.array([9], np.uint32)
    assert operations.field_of(word, begin, length).tolist() == [0x112]
    assert operations.field_of(word.view(np.int32), begin, length).tolist() == [0x112 - 0x200]
    assert operations.ones(word).tolist() == [bin(0x80FF1234).count("1")]


@pytest.mark.parametrize(("name", "of_nan"), [
    ("eq", False), ("ne", False), ("lt", False), ("neu", True), ("ltu", True), ("geu", True), ("num", False),
    ("nan", True),
])
def test_comparisons_with_nan(name, of_nan):
    one, nan = np.ones(1, np.float32), np.full(1, np.nan, np.float32)
    compare = comparison((name, "f32"), F32)
    assert [bool(compare(*pair)[0]) for pair in ((one, nan), (nan, one), (nan, nan))] == [of_nan] * 3
    assert bool(compare(one, one)[0]) == (name in ("eq", "geu", "num"))


def test_numbers_in_the_text():
    assert constant("0f3F800000", F32, 2).tolist() == [1.0, 1.0]
    assert constant("-1", S32, 1).tolist() == [-1]
    assert constant("-1", U32, 1).tolist() == [0xFFFFFFFF]
    assert constant("0x7770U", U32, 1).tolist() == [0x7770]
    assert constant("1065353216", F32, 1).tolist() == [1.0]  # bits


def test_two_numbers_of_one_register():
    pair = Kind("f", 32, 2)
    bits = registers(np.array([1.0, 2.0, 3.0, 4.0], np.float32), pair, 64)
    assert bits.shape == (2,)
    both = operation("add", ("rn", "f32x2"), pair)(numbers(bits, pair), numbers(bits, pair))
    assert both.tolist() == [2.0, 4.0, 6.0, 8.0]


def test_what_is_not_emulated_is_refused_by_name():
    for refused in (lambda: operation("div", ("full", "f32"), F32), lambda: comparison(("and", "f32"), F32),
                    lambda: conversion(("sat", "u32", "f32"), U32, F32)):
        with pytest.raises(UnknownInstructionError, match=r"div\.full|setp\.and|cvt\.sat"):
            refused()


def test_the_smaller_size_has_the_sign_of_a_product():
    a, b = np.float32([3, -3, 3, -3, 0.5, -0.0, np.nan, -np.inf]), np.float32([2, 2, -2, -2, 2, 2, 2, 2])
    found = operation("min", ("NaN", "xorsign", "abs", "f32"), F32)(a, b)
    assert found.tolist()[:6] == [2, -2, -2, 2, 0.5, -0.0]
    assert np.signbit(found[5])
    assert np.isnan(found[6])
    assert found[7] == -2
