"""Quotients without a division are those of the division: every case of float32 in which they could differ."""

import numpy as np
import pytest
import torch

from qtk.numerics import affine
from qtk.numerics.effective import SMALLEST_SCALE
from tests.kernels import conformance
from tests.ptx.operations import fma

triton = pytest.importorskip("triton")
tl = triton.language
division = pytest.importorskip("qtk.kernels.gpu.division")
kernels = pytest.importorskip("qtk.kernels.gpu.fake_quantize")
pytestmark = pytest.mark.kernels
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def inverses(odd, bits):
    """The inverse modulo 2^bits of odd numbers, by Newton's iteration."""
    result = odd.copy()
    for _ in range(5):  # each doubles the bits that are right, of 3
        result = result * (2 - odd * result) & ((1 << bits) - 1)
    return result


def quotients_near_a_tie(divisors):
    """All pairs of mantissas (x, y), integers in [2²³, 2²⁴), whose quotient is within 5 / 2y ulp of a tie.

    A tie n / 2^bits is an odd n in [2²⁴, 2²⁵), with bits = 24 if x ≥ y, else 25. Its distance d from the quotient,
    x · 2^bits = y · n + d, is in units of 1 / 2y ulp. Elsewhere ``near + r · inverse`` is on the quotient's side of the
    tie: the residual r, less than 1.5 y ulps, is rounded by at most one unit of its last place, 1 / y ulp, and its
    product by the inverse, which is off by a share of 2⁻²⁴, by 1.5 / 2²⁴ ulp: 5 of these units at most.
    """
    for bits in (24, 25):
        for distance in (1, 3, 5, 2, 4):
            twos = (distance & -distance).bit_length() - 1  # y has as many factors 2, for n is odd
            y = divisors[divisors & ((2 << twos) - 1) == 1 << twos]
            inverse = inverses(y >> twos, bits - twos)
            for d in (distance, -distance):
                first = inverse * (-d >> twos) & ((1 << (bits - twos)) - 1)
                for more in range(1 << twos):
                    n = first + (more << (bits - twos)) + ((1 << 24) if bits == 24 else 0)
                    product = y * n + d
                    x = product >> bits
                    assert (product == x << bits).all()
                    assert (n & 1).all()
                    is_one = (n >= 1 << 24) & (n < 1 << 25) & (x >= 1 << 23) & (x < 1 << 24)
                    is_one &= (x >= y) == (bits == 24)
                    yield x[is_one].astype(np.float32), y[is_one].astype(np.float32)


@pytest.mark.medium
def test_every_quotient_that_is_near_a_tie_is_rounded_correctly():
    count = wrong = without_correction = 0
    for begin in range(1 << 23, 1 << 24, 1 << 19):
        for x, y in quotients_near_a_tie(np.arange(begin, begin + (1 << 19), dtype=np.int64)):
            inverse = np.float32(1) / y
            near = x * inverse
            quotient = fma(fma(-near, y, x), inverse, near)
            count += len(x)
            wrong += int((quotient != x / y).sum())
            without_correction += int((near != x / y).sum())
    assert wrong == 0
    assert count > 2e7
    assert without_correction > count / 4


@triton.jit
def quotients_kernel(x_at, scale_at, y_at, LIMITED: tl.constexpr):
    at = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    by = division.divisor(tl.load(scale_at + at), -4194304.0, 4194304.0)
    if LIMITED:
        tl.store(y_at + at, division.limited_quotient(tl.load(x_at + at), by))
    else:
        tl.store(y_at + at, division.quotient(tl.load(x_at + at), by))


@pytest.mark.parametrize("is_limited", [False, True])
def test_the_kernels_divide_so(is_limited):
    given = list(quotients_near_a_tie(np.arange(1 << 23, (1 << 23) + (1 << 10), dtype=np.int64)))
    x, scale = (torch.from_numpy(np.concatenate(each)) for each in zip(*given, strict=True))
    sign = torch.where(torch.arange(len(x)) % 3 == 0, -1.0, 1.0)
    x, scale = (torch.nn.functional.pad(each, (0, -len(x) % 1024), value=1.0) for each in (x * sign, scale))
    result = torch.full_like(x, torch.nan)
    moved = [each.to(DEVICE) for each in (x, scale, result)]
    quotients_kernel[(len(x) // 1024,)](*moved, LIMITED=is_limited, enable_fp_fusion=False)
    assert torch.equal(moved[2].cpu(), x / scale)


@pytest.mark.medium
@pytest.mark.parametrize("way", ["triton", "op"])
@pytest.mark.parametrize("codes", ["int8", "uint4", "int2"])
def test_what_is_about_halfway_between_two_codes(codes, way):
    """Neighbours of every middle, for scales from the smallest on; 1, 3 and 5 bits of them make ties."""
    qmin, qmax = conformance.CODES[codes]
    generator = torch.Generator().manual_seed(0)
    scales = [SMALLEST_SCALE, SMALLEST_SCALE * 1.37, 1e-12, 0.75, 1.0, 40 / 32, 3e7, 2.0**100, 1.9e36]
    scales += torch.rand(40, generator=generator).tolist()
    if codes == "int2":
        scales += [2.0**126, 1.1e38, 1.6e38]  # their inverses are no normal numbers
    scale = torch.tensor(scales)
    middles = (torch.arange(qmin - 2, qmax + 2) + 0.5) * scale[:, None]
    bits = middles.view(torch.int32)
    x = torch.stack([bits + away for away in range(-3, 4)], -1).view(torch.float32).flatten(1)
    x = torch.cat((x, torch.tensor([[torch.inf, -torch.inf, 0.0, -0.0, 1e-45, -1e-40]]).expand(len(scale), -1)), 1)
    forward = kernels.fake_quantize if way == "triton" else torch.ops.qtk.fake_quantize.default
    given = [each.to(DEVICE) for each in (x, scale)]
    zero_points = (None,) if codes == "int2" else (None, torch.full((len(scale),), 3, dtype=torch.int32))
    for zero in zero_points:
        result = forward(*given, None if zero is None else zero.to(DEVICE), (1, -1), qmin, qmax)
        assert conformance.same_bits(result.cpu(), affine.fake_quantize(x, scale, zero, (1, -1), qmin, qmax))
