"""The device functions, element by element, against torch and plain Python; on a GPU, else in the interpreter."""

import math

import pytest
import torch

from qtk.numerics.effective import SMALLEST_SCALE
from tests.kernels import conformance

triton = pytest.importorskip("triton")
tl = triton.language
codes = pytest.importorskip("qtk.kernels.gpu.codes")
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid):RuntimeWarning")  # of the interpreter
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = {"e4m3": (torch.float8_e4m3fn, 3, -6, 448.0), "e5m2": (torch.float8_e5m2, 2, -14, 57344.0)}
"""Type of torch, bits of the mantissa, least normal exponent, largest number."""


@triton.jit
def rounded_kernel(x_at, y_at, LENGTH: tl.constexpr):
    at = tl.arange(0, LENGTH)
    tl.store(y_at + at, codes.rounded(tl.load(x_at + at)))


@triton.jit
def narrowed_kernel(x_at, y_at, LENGTH: tl.constexpr):
    at = tl.arange(0, LENGTH)
    tl.store(y_at + at, codes.narrowed(tl.load(x_at + at), y_at.dtype.element_ty))


@triton.jit
def number_kernel(x_at, y_at, LENGTH: tl.constexpr, MANTISSA: tl.constexpr, SMALLEST: tl.constexpr):
    at = tl.arange(0, LENGTH)
    x = tl.load(x_at + at)
    tl.store(y_at + at, codes.number_of(x, x, MANTISSA, SMALLEST))


@triton.jit
def range_kernel(scale_at, zero_at, step_at, offset_at, count, qmin, qmax, LENGTH: tl.constexpr):
    at = tl.arange(0, LENGTH)
    step, offset = codes.range_at(scale_at, zero_at, at, at < count, qmin, qmax, True)
    tl.store(step_at + at, step)
    tl.store(offset_at + at, offset)


@triton.jit
def residual_kernel(x_at, residual_at, low, high, LENGTH: tl.constexpr, RESIDUAL: tl.constexpr):
    at = tl.arange(0, LENGTH)
    x = tl.load(x_at + at)
    number = codes.rounded(x)
    nearest = tl.where(number < low, low, tl.where(number > high, high, number))
    tl.store(residual_at + at, codes.residual_of(x, x, number, nearest, RESIDUAL))


def launched(kernel, x, kind=torch.float32, **constants):
    """Runs the kernel on all elements; pads their number to a power of two."""
    length = 1 << (len(x) - 1).bit_length()
    padded = torch.nn.functional.pad(x, (0, length - len(x))).to(DEVICE)
    result = torch.zeros(length, dtype=kind, device=DEVICE)
    kernel[(1,)](padded, result, **constants, LENGTH=length, enable_fp_fusion=False)
    return result[: len(x)].cpu()


def test_ties_are_rounded_to_even_up_to_the_largest_number():
    x = torch.cat((torch.arange(-2000, 2000) / 4, torch.tensor([0.49999997, 2.0**22, 2.0**21 + 0.5, 2.0**22 - 0.5])))
    expected = torch.tensor([float(round(value)) for value in x.tolist()])  # Python rounds ties to even
    assert torch.equal(launched(rounded_kernel, x), expected)
    assert torch.equal(launched(rounded_kernel, -x), -expected)
    assert launched(rounded_kernel, torch.tensor([torch.nan])).isnan().all()


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_narrower_kind_is_rounded_as_torch_does(kind):
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(-(1 << 31), 1 << 31, (4096,), generator=generator).to(torch.int32).view(torch.float32)
    ties = (torch.arange(1 << 10, dtype=torch.int32) << 15 | 0x3F800000).view(torch.float32)  # halfway in bfloat16
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 3.4e38, -65519.0, 65520.0, 6e-8])
    x = torch.cat((random, ties, 1 + torch.arange(1 << 10) / 2048, special))
    assert conformance.same_bits(launched(narrowed_kernel, x, kind), x.to(kind))


@pytest.mark.parametrize("name", FORMATS)
def test_a_minifloat_is_what_torch_casts_to(name):
    kind, mantissa, least, largest = FORMATS[name]
    generator = torch.Generator().manual_seed(0)
    everywhere = 2 ** (torch.rand(1000, generator=generator) * (math.log2(largest) - least + 8) + least - 8)
    numbers = torch.arange(256, dtype=torch.uint8).view(kind).float()
    numbers = numbers[numbers.isfinite() & (numbers >= 0)].sort().values
    x = torch.cat((everywhere, numbers, (numbers[1:] + numbers[:-1]) / 2, torch.tensor([0.0, 1e-40])))
    x = torch.cat((x, -x))
    found = launched(number_kernel, x, MANTISSA=mantissa, SMALLEST=127 + least)
    assert conformance.same_bits(found, x.to(kind).float())


def test_scales_are_positive_and_zero_points_are_codes():
    scale = torch.tensor([0.5, -0.5, 0.0, -0.0, SMALLEST_SCALE / 2, 3.0, torch.nan])
    zero = torch.tensor([0.5, 1.5, -2.5, -9.0, 300.0, 6.49, -8.4])
    steps, offsets = torch.zeros(8, device=DEVICE), torch.zeros(8, device=DEVICE)
    range_kernel[(1,)](scale.to(DEVICE), zero.to(DEVICE), steps, offsets, 7, -8.0, 7.0, LENGTH=8)
    assert steps[:6].tolist() == pytest.approx([0.5, 0.5, *[SMALLEST_SCALE] * 3, 3.0], rel=0)
    assert steps[6].isnan()
    assert offsets[:7].tolist() == [0.0, 2.0, -2.0, -8.0, 7.0, 6.0, -8.0]
    assert (float(steps[7]), float(offsets[7])) == (1.0, 0.0)  # of a scale that does not exist


@pytest.mark.parametrize("learned", [False, True])
def test_a_residual_says_where_an_element_is(learned):
    x = torch.tensor([-9.0, -2.5, -2.0, -1.75, -0.25, -0.0, 0.0, 0.25, 1.125, 3.0, 3.5, 3.75, 40.0, torch.nan])
    inside = [-2 <= round(value) <= 3 for value in x[:-1].tolist()] + [False]  # codes from -2 to 3
    expected = []
    for value, is_inside in zip(x.tolist(), inside, strict=True):
        if not learned:
            expected.append((1 if value > 0 else 0) if is_inside else -1 if value <= 0 else 2)
        elif is_inside:
            expected.append(32766 if value == 0 else round((round(value) - value) * 65530))
        else:
            expected.append(-32767 if value != value else -32768 if value < 0 else 32767)
    kind, bits = (torch.int16, 16) if learned else (torch.int8, 8)
    found = launched(residual_kernel, x, kind, low=-2.0, high=3.0, RESIDUAL=bits)
    assert found.tolist() == expected
