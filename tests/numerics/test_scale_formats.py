import math

import pytest
import torch

from qtk.core.dtypes import DTYPES, FloatDtype
from qtk.errors import SpecError
from qtk.numerics import affine, minifloat
from qtk.numerics.scale_formats import (
    SMALLEST_E4M3,
    float8,
    integer_multiples,
    largest_exponent,
    power_of_two,
)
from tests.numerics.small_floats import nearest

FLOATS = {name: row for name, row in DTYPES.items() if isinstance(row, FloatDtype)}


def block_values(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, 64, generator=generator) * torch.logspace(-6, 4, 6)[:, None]
    x[2, :32] = 0
    return x


@pytest.mark.parametrize("name", FLOATS)
def test_mx_blocks_are_those_of_the_standard(name):
    """Section 6.3 in Python's floats, number by number."""
    x, format = block_values(), FLOATS[name]
    scale = power_of_two(x.reshape(6, 2, 32).abs().amax(-1), largest_exponent(format))
    found = minifloat.fake_quantize(x, scale, (1, 32), format)
    for row in range(6):
        for block in range(2):
            own = x[row, 32 * block : 32 * block + 32].tolist()
            largest = max(map(abs, own))
            if largest == 0:
                assert not found[row, 32 * block : 32 * block + 32].any()
                continue
            step = 2.0 ** (math.floor(math.log2(largest)) - largest_exponent(format))
            expected = [nearest(value / step, format) * step for value in own]
            assert found[row, 32 * block : 32 * block + 32].tolist() == expected


def test_mxint8():
    x = block_values()
    amax = x.reshape(6, 2, 32).abs().amax(-1)
    scale = power_of_two(amax, 0) * 2.0**-6  # the unit of its elements
    found = affine.fake_quantize(x, scale, None, (1, 32), -127, 127)
    step = 2.0 ** torch.floor(torch.log2(amax.double())) / 64
    step = step.nan_to_num(posinf=1.0).clamp(min=1e-30).repeat_interleave(32, 1)
    assert torch.equal(found.double(), (x.double() / step).round().clamp(-127, 127) * step)


def test_the_exponent_of_a_shared_scale_is_eight_bits_and_what_is_not_finite_has_none():
    amax = torch.tensor([1e-45, 3e38, torch.inf, torch.nan, 1.0, 2.0 - 2.0**-23, 2.0])
    found = power_of_two(amax, 2)
    assert found[[0, 1, 4, 5, 6]].tolist() == [2.0**-127, 2.0**125, 0.25, 0.25, 0.5]
    assert found[[2, 3]].isnan().all()


def test_nvfp4_in_exact_arithmetic():
    x = block_values()
    x[5] *= 1e-12  # smaller than the smallest stored scale
    amax = x.reshape(6, 4, 16).abs().amax(-1)
    scale, tensor_scale = float8(amax, x.abs().max())
    assert float(tensor_scale) == pytest.approx(float(x.abs().max()) / 2688, rel=1e-6)
    stored = (scale / tensor_scale).tolist()
    for row, blocks in enumerate(stored):
        for block, value in enumerate(blocks):
            wanted = float(amax[row, block] / 6 / tensor_scale)
            expected = max(nearest(wanted, FLOATS["fp8_e4m3"]), SMALLEST_E4M3)
            assert value == pytest.approx(expected, rel=1e-6)  # one float32 product and one quotient
    found = minifloat.fake_quantize(x, scale, (1, 16), FLOATS["fp4_e2m1"])
    wide = scale.repeat_interleave(16, 1)
    expected = [[nearest(float(a / s), FLOATS["fp4_e2m1"]) * float(s) for a, s in zip(*pair, strict=True)]
                for pair in zip(x, wide, strict=True)]
    assert found.tolist() == torch.tensor(expected).tolist()
    assert float8(torch.zeros(3), torch.tensor(0.0))[1] == 1


@pytest.mark.parametrize(("axis", "bits"), [(0, 4), (1, 4), (-1, 2), (0, 8)])
def test_lpbq_scales_are_the_nearest_multiples(axis, bits):
    raw = torch.rand(5, 7, generator=torch.Generator().manual_seed(0)) + 1e-3
    scale, channel_scale = integer_multiples(raw, axis, bits=bits)
    lines = raw if axis % 2 == 0 else raw.t()
    for own, line in zip((scale if axis % 2 == 0 else scale.t()).tolist(), lines.tolist(), strict=True):
        unit = max(line) / 2**bits
        expected = [min(max(round(value / unit), 1), 2**bits) * unit for value in line]
        assert own == pytest.approx(expected, rel=1e-6)
    assert channel_scale.shape == ((5, 1) if axis % 2 == 0 else (1, 7))


@pytest.mark.parametrize("bits", [0, 9])
def test_other_widths_of_integer_scales_are_refused(bits):
    with pytest.raises(SpecError, match="1 to 8"):
        integer_multiples(torch.ones(2, 2), 0, bits=bits)
