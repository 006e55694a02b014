import pytest
import torch

from qtk.calibrators.abs_max import AbsMax
from qtk.calibrators.min_max import MinMax
from qtk.core.dtypes import dtype
from qtk.core.granularity import PerBlock, PerChannel, PerTensor
from qtk.core.spec import QuantSpec

X = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))


def encoding_by(calibrator, spec, x=X):
    observer = calibrator.observer(spec.granularity, static=True)
    observer.observe(x)
    return calibrator.encodings([observer], [spec])[0]


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("granularity", [PerTensor(), PerChannel(0), PerBlock((1, 32))], ids=str)
def test_the_scale_is_the_largest_magnitude_over_half_the_span(bits, granularity):
    spec = QuantSpec(dtype(f"int{bits}"), granularity, symmetric=True)
    blocks = {PerTensor(): X.reshape(1, -1), PerChannel(0): X}.get(granularity, X.reshape(-1, 32)).double()
    expected = blocks.abs().amax(1) / ((2**bits - 1) / 2) * 4095 / 4096
    torch.testing.assert_close(encoding_by(AbsMax(), spec).scale.flatten().double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bits", [2, 3])
def test_normal_weights_of_few_bits_lose_less_than_by_min_max(bits):
    spec = QuantSpec(dtype(f"int{bits}"), PerBlock((1, 32)), symmetric=True)
    errors = []
    for calibrator in (AbsMax(), MinMax()):
        scale = encoding_by(calibrator, spec).scale.double().repeat_interleave(32, 1)
        codes = (X.double() / scale).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        errors.append(float((X - codes * scale).square().sum()))
    assert errors[0] < 0.9 * errors[1]


@pytest.mark.parametrize("bits", [2, 3])
def test_a_factor_changes_no_code(bits):
    spec = QuantSpec(dtype(f"int{bits}"), PerChannel(0), symmetric=True)
    weight = X - 0.5  # the largest magnitudes are negative
    codes = [(each / encoding_by(AbsMax(), spec, each).scale.reshape(-1, 1)).round()
             for each in (weight, *(weight * torch.rand(6, 1) for _ in range(50)))]
    assert all(torch.equal(each, codes[0]) for each in codes)
    assert codes[0].min() == -(2 ** (bits - 1))


@pytest.mark.parametrize("spec", [
    QuantSpec(dtype("uint3")), QuantSpec(dtype("int3"), symmetric=True, narrow_range=True),
    QuantSpec(dtype("fp4_e2m1"), symmetric=True)], ids=str)
def test_asymmetric_and_even_ranges_are_those_of_min_max(spec):
    assert encoding_by(AbsMax(), spec).equals(encoding_by(MinMax(), spec))


def test_zeros_have_scale_1():
    spec = QuantSpec(dtype("int2"), symmetric=True)
    assert encoding_by(AbsMax(), spec, torch.zeros(3)).scale.item() == 1.0
