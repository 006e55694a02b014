import math

import pytest
import torch
import torch.nn.functional as F

from qtk.algorithms.smooth_quant import (
    GRID,
    LARGEST_SCALE,
    SmoothedInput,
    SmoothedProduct,
    at,
    output_error,
    per_channel,
    search,
    smoothing_scale,
)

LEVELS = 127


def rounded(x, absmax):
    """Symmetric 8-bit rounding, written out."""
    step = absmax / LEVELS
    return (x / step).round().clamp(-LEVELS, LEVELS) * step


def round_input(x, scale):
    return rounded(x, x.abs().max())


def linear(weight):
    return SmoothedProduct(
        weight, torch.arange(weight.shape[1])[None], F.linear,
        lambda x, w: F.linear(x, rounded(w, w.abs().amax(1, keepdim=True))),
    )


def outliers(channels=8, factor=100.0):
    torch.manual_seed(0)
    x, weight = torch.randn(64, channels, dtype=torch.float64), torch.randn(5, channels, dtype=torch.float64)
    x[:, 2] *= factor
    weight[:, 2] /= factor
    return x, weight


def smoothed(x, *weights):
    return SmoothedInput([x], -1, torch.arange(x.shape[1]), round_input, [linear(weight) for weight in weights])


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
def test_the_formula_of_the_paper_up_to_a_common_factor(alpha):
    a, w = torch.tensor([3.0, 50.0, 0.2], dtype=torch.float64), torch.tensor([1.0, 0.1, 4.0], dtype=torch.float64)
    scale = smoothing_scale(a, w, alpha)
    expected = a**alpha / w ** (1 - alpha)
    assert torch.allclose(scale / scale[0], expected / expected[0])
    assert math.isclose(float((a / scale).max()), 50.0)


def test_dead_channels_stay():
    a, w = torch.tensor([1.0, 0.0, 2.0, 4.0]), torch.tensor([1.0, 3.0, 0.0, 1.0])
    scale = smoothing_scale(a, w, 0.5)
    assert scale[1:3].tolist() == [1.0, 1.0]
    assert scale.isfinite().all()
    assert smoothing_scale(torch.zeros(3), torch.ones(3), 0.5).tolist() == [1.0, 1.0, 1.0]


def test_a_nearly_dead_channel_is_not_blown_up():
    a = torch.tensor([1.0, 1.0, 1.0, 1e-20])
    scale = smoothing_scale(a, torch.ones(4), 1.0)
    assert float(scale[3]) > 0.5 / LARGEST_SCALE**2
    assert (scale > 0).all()


def test_half_an_alpha_gives_input_and_weight_the_same_range():
    a, w = torch.rand(6, dtype=torch.float64) + 0.1, torch.rand(6, dtype=torch.float64) + 0.1
    scale = smoothing_scale(a, w, 0.5)
    ratio = (a / scale) / (w * scale)
    assert torch.allclose(ratio, ratio[0].expand(6))


def test_missing_index():
    assert at(torch.tensor([2.0, 3.0]), torch.tensor([[1, -1], [0, 0]])).tolist() == [[3.0, 1.0], [2.0, 2.0]]


def test_channels_line_up():
    assert [tuple(per_channel(torch.ones(3), axis, 4).shape) for axis in (1, -1)] == [(1, 3, 1, 1), (1, 1, 1, 3)]


def test_the_error_is_that_of_the_smoothed_quantized_product():
    x, weight = outliers()
    scale = torch.rand(8, dtype=torch.float64) + 0.5
    quantized = F.linear(rounded(x / scale, (x / scale).abs().max()), rounded(
        weight * scale, (weight * scale).abs().amax(1, keepdim=True)))
    exact = F.linear(x, weight)
    expected = float((quantized - exact).square().sum() / exact.square().sum())
    assert smoothed(x, weight).noise_to_signal(scale) == pytest.approx([expected], rel=1e-6)


def test_every_product_counts_once_whatever_its_size():
    x, weight = outliers()
    ones = torch.ones(8, dtype=torch.float64)
    alone = output_error([smoothed(x, weight)], ones)
    assert output_error([smoothed(x, weight, 1000 * weight)], ones) == pytest.approx(alone, rel=1e-6)
    assert output_error([smoothed(x, weight), smoothed(x, weight)], ones) == pytest.approx(alone, rel=1e-6)


def test_without_rounding_nothing_changes():
    x, weight = outliers()
    product = SmoothedProduct(weight, torch.arange(8)[None], F.linear, F.linear)
    smooth = SmoothedInput([x], -1, torch.arange(8), lambda x, scale: x, [product])
    assert smooth.noise_to_signal(torch.rand(8, dtype=torch.float64) + 0.1)[0] < 1e-30


def test_a_channel_without_a_variable_stays():
    x, weight = outliers()
    variable = torch.tensor([0, 1, 2, -1, 3, 4, 5, 6])
    smooth = SmoothedInput([x], -1, variable, lambda x, scale: x, [linear(weight)])
    scale = torch.arange(2.0, 9.0, dtype=torch.float64)
    assert smooth.channel_scale(scale).tolist() == [2, 3, 4, 1, 5, 6, 7, 8]
    direct = F.linear(x / smooth.channel_scale(scale), rounded(
        weight * smooth.channel_scale(scale), (weight * smooth.channel_scale(scale)).abs().amax(1, keepdim=True)))
    exact = F.linear(x, weight)
    expected = float((direct - exact).square().sum() / exact.square().sum())
    assert smooth.noise_to_signal(scale) == pytest.approx([expected], rel=1e-6)


def test_the_search_finds_the_smallest_error_of_the_grid():
    x, weight = outliers()
    inputs = [smoothed(x, weight)]
    absmax = x.abs().amax(0), weight.abs().amax(0)
    errors = {alpha: output_error(inputs, smoothing_scale(*absmax, alpha)) for alpha in GRID}
    best = search(inputs, *absmax)
    assert best.alpha == min(errors, key=errors.__getitem__)
    assert best.after == min(errors.values())
    assert best.before == output_error(inputs, torch.ones(8, dtype=torch.float64))
    assert best.gain_db > 20
    assert torch.equal(best.scale, smoothing_scale(*absmax, best.alpha))


def test_no_smoothing_is_a_candidate():
    x, weight = torch.ones(4, 2, dtype=torch.float64), torch.ones(3, 2, dtype=torch.float64)  # exact without
    best = search([smoothed(x, weight)], torch.tensor([1.0, 0.37]), torch.tensor([1.0, 1.0]))
    assert (best.alpha, best.before, best.after, best.gain_db) == (None, best.after, best.before, 0.0)
    assert best.scale.tolist() == [1.0, 1.0]


def test_a_convolution():
    torch.manual_seed(0)
    x, weight = torch.randn(2, 4, 6, 6, dtype=torch.float64), torch.randn(6, 2, 3, 3, dtype=torch.float64)
    index = torch.tensor([[0, 1]] * 3 + [[2, 3]] * 3)[:, :, None, None]
    product = SmoothedProduct(weight, index, lambda x, w: F.conv2d(x, w, groups=2),
                              lambda x, w: F.conv2d(x, w, groups=2))
    smooth = SmoothedInput([x], 1, torch.arange(4), lambda x, scale: x, [product])
    assert smooth.noise_to_signal(torch.tensor([1.0, 5.0, 0.2, 3.0], dtype=torch.float64))[0] < 1e-28
