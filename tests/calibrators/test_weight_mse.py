"""Against a search over the elements themselves in float64, candidate by candidate."""

import pytest
import torch

from qtk.calibrators.min_max import MinMax
from qtk.calibrators.weight_mse import WeightMse
from qtk.core.dtypes import dtype
from qtk.core.granularity import PerBlock, PerChannel, PerTensor
from qtk.core.spec import QuantSpec
from qtk.errors import CalibrationError

X = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)) + 0.1
GRANULARITIES = {PerTensor(): X.reshape(1, -1), PerChannel(0): X, PerBlock((1, 32)): X.reshape(-1, 32)}


def encoding_by(calibrator, spec, x=X):
    observer = calibrator.observer(spec.granularity, static=True)
    observer.observe(x)
    return calibrator.encodings([observer], [spec])[0]


def expected_error(row, scale, zero, spec, mean, gain):
    change = row - ((row / scale).round() + zero).clamp(spec.qmin, spec.qmax).sub(zero) * scale
    inputs = torch.eye(len(row)).double() + mean / len(row) + gain * row[:, None] * row / row.square().sum()
    return float(change @ inputs @ change)


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("name", ["int2", "int4", "uint3"])
def test_no_other_range_has_a_smaller_error_of_the_output(name, granularity):
    spec = QuantSpec(dtype(name), granularity, symmetric=name != "uint3")
    found = encoding_by(WeightMse(mean=3.0, gain=5.0, steps=7), spec)
    for number, row in enumerate(GRANULARITIES[granularity].double()):
        low, high = float(row.min()), float(row.max())
        if spec.symmetric:
            half = (spec.qmax - spec.qmin) / 2
            scales = torch.linspace(max(-low, high) / spec.qmax, 0.55 * max(-low, high) / half, 7).tolist()
            tried = [(scale, 0) for scale in scales]
        else:
            scales = torch.linspace((high - low) / spec.qmax, 0.55 * (high - low) / spec.qmax, 7)
            tried = [(scale, round(-low / scales[0].item())) for scale in scales.tolist()]
        errors = [expected_error(row, *each, spec, 3.0, 5.0) for each in tried]
        zero = 0 if spec.symmetric else int(found.zero_point.flatten()[number])
        chosen = tried[errors.index(min(errors))]
        assert (float(found.scale.flatten()[number]), zero) == (pytest.approx(chosen[0], rel=1e-6), chosen[1])


@pytest.mark.parametrize("bits", [2, 3])
def test_few_codes_do_not_shrink_the_weights(bits):
    spec = QuantSpec(dtype(f"int{bits}"), PerChannel(0), symmetric=True)
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    shrunk = []
    for gain in (0.0, 6.0):
        scale = encoding_by(WeightMse(gain=gain), spec, weight).scale.reshape(-1, 1)
        rounded = (weight / scale).round().clamp(spec.qmin, spec.qmax) * scale
        shrunk.append(1 - float((rounded * weight).sum() / weight.square().sum()))
    assert shrunk[0] > 0.02
    assert abs(shrunk[1]) < 0.4 * shrunk[0]


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_factor_changes_no_code(bits):
    spec = QuantSpec(dtype(f"int{bits}"), PerChannel(0), symmetric=True)
    codes = [(each / encoding_by(WeightMse(), spec, each).scale.reshape(-1, 1)).round()
             for each in (X, *(X * torch.rand(6, 1) for _ in range(20)))]
    assert all(torch.equal(each, codes[0]) for each in codes)


def test_many_scales_are_searched_in_parts_with_the_same_result():
    spec = QuantSpec(dtype("int3"), PerBlock((1, 32)), symmetric=True)
    x = torch.randn(70, 1024, generator=torch.Generator().manual_seed(2))  # more than is searched at once
    parts = [encoding_by(WeightMse(), spec, part).scale for part in x.split(10)]
    assert torch.equal(encoding_by(WeightMse(), spec, x).scale, torch.cat(parts))


def test_zeros_and_small_floats_have_the_scales_of_min_max():
    for spec, x in ((QuantSpec(dtype("int2"), symmetric=True), torch.zeros(3)),
                    (QuantSpec(dtype("fp4_e2m1"), symmetric=True), X)):
        assert encoding_by(WeightMse(), spec, x).equals(encoding_by(MinMax(), spec, x))


@pytest.mark.parametrize("settings", [{"mean": -1.0}, {"gain": float("inf")}, {"steps": 0}], ids=str)
def test_settings_out_of_range_are_errors(settings):
    with pytest.raises(CalibrationError, match="weight_mse"):
        WeightMse(**settings)
