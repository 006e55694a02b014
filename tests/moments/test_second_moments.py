"""Against the outputs themselves, in float64."""

import pytest
import torch

from qtk.errors import CalibrationError
from qtk.moments.gram_products import PANEL
from qtk.moments.required_statistics import RequiredStatistics
from qtk.moments.second_moments import SecondMoments
from qtk.numerics.im2col import Geometry, im2col, weight_to_gemm

LINEAR = Geometry.linear()
LAYERS = {
    "linear": (Geometry.linear(), (3, 8), (6, 5, 8)),
    "conv": (Geometry((3, 2), (1, 2), (1, 0), (1, 1)), (4, 3, 3, 2), (2, 3, 7, 6)),
    "grouped": (Geometry((3,), (1,), (1,), (1,), 2), (4, 2, 3), (3, 4, 9)),
    "transposed": (Geometry((2, 2), (2, 2), (0, 0), (1, 1), 1, True), (3, 4, 2, 2), (2, 3, 4, 4)),
}


def batches(shape):
    generator = torch.Generator().manual_seed(0)
    originals = [torch.randn(shape, generator=generator) for _ in range(3)]
    return [(x + 0.1 * torch.randn(shape, generator=generator), x) for x in originals]


@pytest.mark.parametrize("layer", LAYERS)
def test_the_error_of_the_output_without_forming_it(layer):
    geometry, weight_shape, shape = LAYERS[layer]
    weight = weight_to_gemm(torch.randn(weight_shape, dtype=torch.float64), geometry)  # [groups, out, columns]
    other = weight + 0.05 * torch.randn_like(weight)
    moments = SecondMoments(geometry, RequiredStatistics(difference=True))
    expected = torch.zeros(weight.shape[:2], dtype=torch.float64)
    for quantized, original in batches(shape):
        moments.observe(quantized, original)
        out = im2col(original.double(), geometry) @ weight.mT
        near = im2col(quantized.double(), geometry) @ other.mT
        expected += (out - near).square().sum(1)
    d = weight - other
    gram, cross, difference = (moment[:, 0] for moment in (moments.gram, moments.cross, moments.difference))
    found = (weight @ difference * weight + 2 * (weight @ cross) * d + (d @ gram) * d).sum(-1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    mean = torch.cat([im2col(x - y, geometry) for y, x in batches(shape)], 1).double().mean(1)
    torch.testing.assert_close(moments.mean_difference, mean, rtol=1e-5, atol=1e-7)
    mean = torch.cat([im2col(y, geometry) for y, x in batches(shape)], 1).double().mean(1)
    torch.testing.assert_close(moments.mean, mean, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("block", [2, 4, 8])
def test_blocks_are_those_of_the_diagonal(block):
    whole, parts = (SecondMoments(LINEAR, RequiredStatistics(size, True)) for size in (None, block))
    for quantized, original in batches((6, 5, 8)):
        whole.observe(quantized, original)
        parts.observe(quantized, original)
    for name in ("gram", "cross", "difference"):
        full, own = getattr(whole, name)[0, 0], getattr(parts, name)[0]
        for index, found in enumerate(own):
            here = slice(index * block, (index + 1) * block)
            torch.testing.assert_close(found, full[here, here], rtol=1e-5, atol=1e-6)


def test_wide_matrices_are_symmetric_and_whole():
    x = torch.randn(40, PANEL + 77)
    moments = SecondMoments(LINEAR)
    moments.observe(x)
    assert torch.equal(moments.gram, moments.gram.mT)
    torch.testing.assert_close(moments.gram[0, 0], x.double().T @ x.double(), rtol=1e-4, atol=1e-4)


def test_merging_is_observing_both():
    both, left, right = (SecondMoments(LINEAR, RequiredStatistics(None, True, dtype=torch.float64)) for _ in range(3))
    for index, (quantized, original) in enumerate(batches((4, 8))):
        both.observe(quantized, original)
        (left if index < 1 else right).observe(quantized, original)
    left.merge(right)
    assert left.rows == both.rows == 12
    for name in ("gram", "cross", "difference", "mean", "mean_difference"):
        torch.testing.assert_close(getattr(left, name), getattr(both, name), rtol=1e-12, atol=1e-12)


def test_what_makes_no_sense_is_refused_and_changes_nothing():
    moments = SecondMoments(LINEAR)
    with pytest.raises(CalibrationError, match="no data"):
        moments.gram  # noqa: B018
    moments.observe(torch.ones(2, 4))
    for given in ((torch.full((2, 4), torch.nan),), (torch.full((2, 4), torch.inf),)):
        with pytest.raises(CalibrationError):
            moments.observe(*given)
    assert moments.rows == 2
    with pytest.raises(CalibrationError, match="blocks of 3 do not divide the 4 columns"):
        SecondMoments(LINEAR, RequiredStatistics(3)).observe(torch.ones(2, 4))
    with pytest.raises(CalibrationError, match="cannot join"):
        moments.merge(SecondMoments(LINEAR, RequiredStatistics(2)))


def test_batches_without_an_input_of_their_own_in_the_float_model_add_nothing_but_h():
    (x, original), (other, _), _ = batches((4, 8))
    mixed, both = SecondMoments(LINEAR), SecondMoments(LINEAR)
    mixed.observe(other)
    mixed.observe(x, original)
    both.observe(other, other)
    both.observe(x, original)
    for name in ("gram", "cross", "mean", "mean_difference"):
        torch.testing.assert_close(getattr(mixed, name), getattr(both, name), rtol=1e-6, atol=1e-7)
    alone = SecondMoments(LINEAR)
    alone.observe(other)
    alone.merge(mixed)
    assert alone.rows == 12
    torch.testing.assert_close(alone.cross, both.cross, rtol=1e-6, atol=1e-7)


def test_of_one_weight_only_what_it_takes_of_e_is_summed():
    weight = torch.randn(1, 3, 8)
    all_weights, one = SecondMoments(LINEAR), SecondMoments(LINEAR, weight=weight)
    assert one.linear(weight) is None
    for quantized, original in batches((6, 5, 8)):
        all_weights.observe(quantized, original)
        one.observe(quantized, original)
    assert one.cross is None
    expected = sum(
        weight[0].double() @ (x - y).reshape(-1, 8).double().T @ y.reshape(-1, 8).double()
        for y, x in batches((6, 5, 8))
    )
    for found in (all_weights.linear(weight.double()), one.linear(weight.double()), one.linear(weight)):
        torch.testing.assert_close(found[0].double(), expected, rtol=1e-5, atol=1e-5)


def test_many_batches_are_carried_into_float64():
    moments, total = SecondMoments(LINEAR), torch.zeros(4, 4, dtype=torch.float64)
    for index in range(40):
        x = torch.full((1, 4), 1 / (index + 3))
        moments.observe(x)
        total += (x.T @ x).double()
    assert moments.rows == 40
    torch.testing.assert_close(moments.gram[0, 0], total, rtol=1e-6, atol=0)
    torch.testing.assert_close(moments.gram_as(torch.float32)[0, 0], total.float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("layer", ["conv", "grouped", "transposed"])
def test_samples_of_a_convolution_go_a_few_at_a_time(layer, monkeypatch):
    geometry, _, shape = LAYERS[layer]
    whole = SecondMoments(geometry, RequiredStatistics(sample_rows=50))
    for quantized, original in batches(shape):
        whole.observe(quantized, original)
    monkeypatch.setattr("qtk.moments.second_moments.ELEMENTS_AT_ONCE", 1)
    parts = SecondMoments(geometry, RequiredStatistics(sample_rows=50))
    for quantized, original in batches(shape):
        parts.observe(quantized, original)
    assert parts.rows == whole.rows
    for name in ("gram", "cross", "mean", "mean_difference"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), rtol=1e-5, atol=1e-5)
    assert torch.equal(torch.cat(parts.sample), torch.cat(whole.sample))


def test_means_alone():
    moments = SecondMoments(LINEAR, RequiredStatistics(gram=False))
    for quantized, original in batches((4, 8)):
        moments.observe(quantized, original)
    expected = torch.cat([x - y for y, x in batches((4, 8))]).double().mean(0)
    torch.testing.assert_close(moments.mean_difference[0], expected, rtol=1e-5, atol=1e-7)
    assert moments.columns == 8
    with pytest.raises(CalibrationError, match="no data"):
        moments.gram  # noqa: B018
