"""Against the mean of every output, formed in float64 by torch's own operators."""

import pytest
import torch
from torch.nn import functional

from qtk.algorithms.bias_correction import bias_correction
from qtk.moments.required_statistics import RequiredStatistics
from qtk.moments.second_moments import SecondMoments
from qtk.numerics.im2col import Geometry, weight_to_gemm

LAYERS = {
    "linear": (Geometry.linear(), (6, 16), (40, 16), -1, functional.linear),
    "tokens": (Geometry.linear(), (6, 16), (3, 7, 16), -1, functional.linear),
    "transposed linear": (Geometry((), (), (), (), transposed=True), (16, 6), (40, 16), -1, lambda x, w: x @ w),
    "conv": (Geometry((3, 2), (2, 1), (1, 0), (1, 2)), (5, 4, 3, 2), (3, 4, 7, 7), 1,
             lambda x, w: functional.conv2d(x, w, stride=(2, 1), padding=(1, 0), dilation=(1, 2))),
    "grouped": (Geometry((3,), (1,), (1,), (1,), 2), (6, 4, 3), (3, 8, 9), 1,
                lambda x, w: functional.conv1d(x, w, padding=1, groups=2)),
    "transposed": (Geometry((3, 3), (2, 2), (1, 1), (1, 1), 1, True, (1, 1)), (4, 5, 3, 3), (3, 4, 4, 4), 1,
                   lambda x, w: functional.conv_transpose2d(x, w, stride=2, padding=1, output_padding=1)),
    "transposed grouped": (Geometry((3,), (2,), (0,), (1,), 2, True), (4, 3, 3), (3, 4, 6), 1,
                           lambda x, w: functional.conv_transpose1d(x, w, stride=2, groups=2)),
}


def mean_of(outputs, axis):
    return outputs.movedim(axis, 0).flatten(1).mean(1)


@pytest.mark.medium
@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_the_mean_of_every_output_is_that_of_the_float_model(name, block, two):
    geometry, shape, x_shape, axis, run = LAYERS[name]
    generator = torch.Generator().manual_seed(0)
    original = torch.randn(x_shape, generator=generator).double() + 0.5
    quantized = original + 0.2 * torch.randn(x_shape, generator=generator) + 0.1 if two else original
    weight = torch.randn(shape, generator=generator).double()
    rounded = (weight * 2).round() / 2
    own, near = weight_to_gemm(weight, geometry), weight_to_gemm(rounded, geometry)
    moments = SecondMoments(geometry, RequiredStatistics(own.shape[-1] // 2 if block else None, dtype=torch.float64))
    for part in range(len(original)):  # the last batch alone is another mean
        one = slice(part, part + 1)
        moments.observe(quantized[one], original[one] if two else None)
    shift = bias_correction(own, near, moments.mean, moments.mean_difference)
    exact, after = mean_of(run(original, weight), axis), mean_of(run(quantized, rounded), axis)
    bias = torch.randn(exact.shape, generator=generator).double()
    before = exact + bias
    assert float((exact - after).abs().min()) > 1e-3  # every output had something to correct
    torch.testing.assert_close(after + bias + shift, before, rtol=1e-10, atol=1e-10)


def test_equal_weights_and_inputs_need_nothing():
    weight = torch.randn(2, 3, 4, dtype=torch.float64)
    mean = torch.randn(2, 4, dtype=torch.float64)
    assert torch.equal(bias_correction(weight, weight, mean, None), torch.zeros(6, dtype=torch.float64))


def test_outputs_of_all_groups_follow_one_another():
    weight, rounded = torch.zeros(2, 2, 1), torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]])
    shift = bias_correction(weight, rounded, torch.tensor([[1.0], [10.0]]), None)
    assert shift.tolist() == [-1, -2, -30, -40]
