import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qtk.core.dtypes import DTYPES, FloatDtype, dtype
from qtk.core.encoding import Encoding
from qtk.core.granularity import PerBlock
from qtk.core.spec import QuantSpec, ScaleFormat
from qtk.errors import CalibrationError
from qtk.numerics.affine import fake_quantize
from qtk.numerics.effective import SMALLEST_SCALE
from qtk.numerics.ranges import choose_range
from qtk.numerics.scale_formats import float8

FLOAT32_MAX = torch.finfo(torch.float32).max
INTEGERS = sorted(name for name, row in DTYPES.items() if not isinstance(row, FloatDtype))
HUGE, TINY = 2.0**123, 2.0**-60
reals = st.floats(-HUGE, HUGE, width=32)


@st.composite
def specs(draw):
    chosen = dtype(draw(st.sampled_from(INTEGERS)))
    return QuantSpec(chosen, symmetric=chosen.signed and draw(st.booleans()), narrow_range=draw(st.booleans()))


def chosen(low, high, spec):
    return choose_range(torch.tensor([low]), torch.tensor([high]), spec)


@pytest.mark.medium
@settings(max_examples=150, deadline=None)
@given(specs(), reals, reals, st.lists(st.floats(0, 1), max_size=5))
def test_every_real_of_the_range_is_within_half_a_step(spec, a, b, fractions):
    low, high = min(a, b), max(a, b)
    scale, zero_point = chosen(low, high, spec)
    Encoding(spec, scale, zero_point)  # a valid one
    points = np.clip(np.float32([low + (high - low) * f for f in (0, 1, 0.5, *fractions)]), low, high)
    x = torch.from_numpy(points)
    error = (fake_quantize(x, scale, zero_point, (), spec.qmin, spec.qmax).double() - x.double()).abs()
    slack = 4e-7 * float(x.abs().max())  # float32 rounding of the scale and of x / scale
    assert float(error.max()) <= 0.5 * float(scale) * (1 + 1e-5) + slack


@settings(max_examples=100, deadline=None)
@given(specs(), reals, reals)
def test_zero_is_exact(spec, a, b):
    scale, zero_point = chosen(min(a, b), max(a, b), spec)
    assert fake_quantize(torch.zeros(1), scale, zero_point, (), spec.qmin, spec.qmax).item() == 0.0


@settings(max_examples=100, deadline=None)
@given(specs(), st.floats(TINY, HUGE, width=32), st.floats(TINY, HUGE, width=32))
def test_no_smaller_step_would_do(spec, below, above):
    """The range just fits: the codes span no more than the range and one step."""
    scale, _ = chosen(-below, above, spec)
    step = float(scale)
    if spec.symmetric:
        expected = max(above / spec.qmax, below / -spec.qmin)
    else:
        expected = (above + below) / (spec.qmax - spec.qmin)
    assert step == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(-128.0, 10.0, 1.0), (-10.0, 127.0, 1.0), (-128.0, 127.0, 1.0), (-64.0, 127.0, 1.0), (-256.0, 127.0, 2.0)],
)
def test_symmetric_uses_both_sides(low, high, expected):
    assert chosen(low, high, QuantSpec(dtype("int8"), symmetric=True))[0].item() == expected


def test_narrow_range_leaves_the_lowest_code_out():
    scale, _ = chosen(-127.0, 0.0, QuantSpec(dtype("int8"), symmetric=True, narrow_range=True))
    assert scale.item() == 1.0


@pytest.mark.parametrize(
    ("low", "high", "step", "zero"),
    [
        (0.0, 255.0, 1.0, 0), (-255.0, 0.0, 1.0, 255), (-1.0, 254.0, 1.0, 1), (5.0, 255.0, 1.0, 0),
        (-255.0, -3.0, 1.0, 255),
    ],
)
def test_asymmetric_holds_zero(low, high, step, zero):
    scale, zero_point = chosen(low, high, QuantSpec(dtype("uint8")))
    assert (scale.item(), zero_point.item()) == (step, zero)
    assert scale.dtype == torch.float32
    assert zero_point.dtype == torch.int32


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_range_of_width_zero_has_scale_one(symmetric):
    scale, zero_point = chosen(0.0, 0.0, QuantSpec(dtype("int8"), symmetric=symmetric))
    assert scale.item() == 1.0
    assert zero_point is None if symmetric else zero_point.item() == -128


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_tiny_range_gets_the_smallest_scale(symmetric):
    scale, _ = chosen(0.0, 1e-42, QuantSpec(dtype("int8"), symmetric=symmetric))
    assert scale.item() == SMALLEST_SCALE


@pytest.mark.parametrize(
    "spec", [QuantSpec(dtype("int8"), symmetric=True), QuantSpec(dtype("uint8")), QuantSpec(dtype("int2"))], ids=str
)
@pytest.mark.parametrize("low", [-FLOAT32_MAX, -FLOAT32_MAX / 3, 0.0])
def test_the_ends_of_float32_stay_finite_and_within_a_step(spec, low):
    scale, zero_point = chosen(low, FLOAT32_MAX, spec)
    encoding = Encoding(spec, scale, zero_point)
    assert encoding.minimum.isfinite().all()
    assert encoding.maximum.isfinite().all()
    ends = torch.tensor([low, FLOAT32_MAX])
    real = fake_quantize(ends, scale, zero_point, (), spec.qmin, spec.qmax)
    assert float((real.double() - ends.double()).abs().max()) <= float(scale) * (1 + 1e-4)


def test_shapes_are_kept_and_channels_do_not_mix():
    low, high = -torch.rand(3, 4), torch.rand(3, 4)
    scale, zero_point = choose_range(low, high, QuantSpec(dtype("int8")))
    for index in np.ndindex(3, 4):
        one, zero = chosen(low[index].item(), high[index].item(), QuantSpec(dtype("int8")))
        assert scale[index] == one.item()
        assert zero_point[index] == zero.item()


@pytest.mark.parametrize(
    ("low", "high"),
    [(0.0, torch.inf), (-torch.inf, 0.0), (torch.nan, 1.0), (0.0, torch.nan), (2.0, 1.0)],
)
def test_what_is_no_range_is_refused_with_its_place(low, high):
    minimum, maximum = torch.zeros(2, 3), torch.ones(2, 3)
    minimum[1, 2], maximum[1, 2] = low, high
    with pytest.raises(CalibrationError, match=r"at \(1, 2\) it is") as caught:
        choose_range(minimum, maximum, QuantSpec(dtype("int8")))
    assert "1 of 6" in str(caught.value)


@pytest.mark.parametrize("name", sorted(set(DTYPES) - set(INTEGERS)))
def test_the_largest_magnitude_becomes_the_largest_float(name):
    spec = QuantSpec(dtype(name), symmetric=True)
    for low, high in ((-3.0, 1.0), (-1.0, 3.0), (0.0, 3.0)):
        scale, zero_point = chosen(low, high, spec)
        assert zero_point is None
        assert scale.item() == float(torch.tensor(3.0 / spec.qmax))


BLOCKS = PerBlock((1, 4))


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (QuantSpec(dtype("fp4_e2m1"), BLOCKS, symmetric=True, scale_format=ScaleFormat.E8M0),
         [[2.0, 0.25], [4.0, 1.0]]),  # 7 is 8 with one bit of mantissa
        (QuantSpec(dtype("int8"), BLOCKS, symmetric=True, narrow_range=True, scale_format=ScaleFormat.E8M0),
         [[0.0625, 0.015625], [0.125, 1.0]]),
        (QuantSpec(dtype("int4"), BLOCKS, symmetric=True, narrow_range=True, scale_format=ScaleFormat.INT4),
         [[1.0, 0.1875], [2.0, 0.125]]),
    ],
    ids=str,
)
def test_scales_that_are_stored_in_few_bits(spec, expected):
    high = torch.tensor([[7.0, 1.3], [14.0, 0.0]])
    scale, _ = choose_range(-high, high, spec)
    assert scale.tolist() == expected


def test_nvfp4_scales_are_e4m3_numbers_times_one_of_the_tensor():
    spec = QuantSpec(dtype("fp4_e2m1"), BLOCKS, symmetric=True, scale_format=ScaleFormat.E4M3)
    high = torch.rand(5, 6, generator=torch.Generator().manual_seed(0)) * 9
    scale, _ = choose_range(-high, high * 0.5, spec)
    assert torch.equal(scale, float8(high, high.max())[0])
