import itertools
import math

import pytest
import torch

from qtk.core.dtypes import DTYPES, FloatDtype
from qtk.numerics.minifloat import fake_quantize, fake_quantize_backward, from_bits, round_to, to_bits
from tests.numerics.small_floats import numbers

FORMATS = {name: row for name, row in DTYPES.items() if isinstance(row, FloatDtype)}
TORCH = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
OCP = {  # OCP Microscaling Formats 1.0, section 5.3: largest, smallest normal, smallest subnormal
    "fp8_e4m3": (448.0, 2.0**-6, 2.0**-9),
    "fp8_e5m2": (57344.0, 2.0**-14, 2.0**-16),
    "fp6_e3m2": (28.0, 0.25, 0.0625),
    "fp6_e2m3": (7.5, 1.0, 0.125),
    "fp4_e2m1": (6.0, 1.0, 0.5),
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_numbers_are_those_of_the_standard(name):
    own = numbers(FORMATS[name])
    normal, subnormal = 2.0 ** (2 - (1 << (FORMATS[name].exponent_bits - 1))), own[1]
    assert (max(own), normal, subnormal) == OCP[name]
    assert torch.equal(round_to(torch.tensor(own), FORMATS[name]), torch.tensor(own))


@pytest.mark.parametrize("name", FORMATS)
def test_bits_are_sign_exponent_and_mantissa(name):
    row = FORMATS[name]
    positive = numbers(row)
    own = torch.tensor([*positive, *(-number for number in positive)])
    sign = 1 << (row.bits - 1)
    assert to_bits(own, row).tolist() == [*range(len(positive)), *range(sign, sign + len(positive))]
    assert torch.equal(from_bits(to_bits(own, row), row).view(torch.int32), own.view(torch.int32))
    if name in TORCH:
        assert torch.equal(to_bits(own, row).to(torch.uint8), own.to(TORCH[name]).view(torch.uint8))


@pytest.mark.parametrize("name", FORMATS)
def test_what_lies_between_goes_to_the_nearest_and_ties_to_the_even_mantissa(name):
    own = numbers(FORMATS[name])
    for index, (low, high) in enumerate(itertools.pairwise(own)):
        middle = (low + high) / 2
        near = torch.tensor([middle, math.nextafter(middle, 0), math.nextafter(middle, math.inf)], dtype=torch.float64)
        given = near.to(torch.float32)
        given[1] = torch.nextafter(given[0], torch.tensor(0.0))
        given[2] = torch.nextafter(given[0], torch.tensor(torch.inf))
        even = low if index % 2 == 0 else high
        assert round_to(given, FORMATS[name]).tolist() == [even, low, high]
        assert round_to(-given, FORMATS[name]).tolist() == [-even, -low, -high]


@pytest.mark.parametrize("name", TORCH)
def test_it_is_torchs_cast_bit_for_bit_where_that_does_not_overflow(name):
    bits = torch.arange(0, 1 << 32, 65521, dtype=torch.int64).to(torch.int32)
    x = bits.view(torch.float32)
    x = torch.cat((x, torch.randn(100_000) * 100, torch.randn(100_000) * 1e-3))
    x = x[x.abs() <= FORMATS[name].largest]
    expected = x.to(TORCH[name]).float()
    assert torch.equal(round_to(x, FORMATS[name]), expected)
    assert torch.equal(round_to(x, FORMATS[name]).signbit(), expected.signbit())


@pytest.mark.parametrize("name", FORMATS)
def test_the_ends(name):
    largest = FORMATS[name].largest
    x = torch.tensor([torch.inf, -torch.inf, 1e38, -3e38, largest * 1.001, -0.0, 1e-45, torch.nan])
    found = round_to(x, FORMATS[name])
    assert found[:7].tolist() == [largest, -largest, largest, -largest, largest, 0.0, 0.0]
    assert found[7].isnan()
    assert math.copysign(1, float(found[5])) == -1


def test_scales_of_every_granularity():
    x = torch.randn(6, 8)
    for shape, block_size in (((1,), ()), ((6,), (1, -1)), ((8,), (-1, 1)), ((6, 2), (1, 4))):
        scale = torch.rand(shape) + 0.1
        found = fake_quantize(x, scale, block_size, FORMATS["fp4_e2m1"])
        wide = scale if len(shape) == 1 and shape[0] in (1, 8) else scale.reshape(6, -1)
        wide = wide.repeat_interleave(4, 1) if shape == (6, 2) else wide
        assert torch.equal(found, round_to(x / wide, FORMATS["fp4_e2m1"]) * wide)


def test_the_gradient_is_straight_through():
    x = torch.tensor([0.6, -1.9, 99.0, 6.9, 7.1], dtype=torch.float32)
    grad = torch.tensor([1.0, 10.0, 100.0, 1000.0, 10000.0])
    dx, dscale = fake_quantize_backward(grad, x, torch.ones(1), (), FORMATS["fp4_e2m1"])
    assert dx.tolist() == [1, 10, 0, 1000, 0]  # 6.9 rounds to 6, 7.1 would round to 8
    expected = 1 * (0.5 - 0.6) + 10 * (-2 + 1.9) + 100 * 6 + 1000 * (6 - 6.9) + 10000 * 6
    assert float(dscale) == pytest.approx(expected, rel=1e-6)
