import torch

from qtk.numerics.effective import SMALLEST_SCALE, effective_scale, effective_scale_backward, effective_zero_point


def test_a_scale_acts_by_its_size_and_its_gradient_is_that_of_autograd():
    scale = torch.tensor([0.5, -0.25, 0.0, -0.0, 2 * SMALLEST_SCALE, -1e-40], requires_grad=True)
    acting = effective_scale(scale)
    assert acting.tolist() == [0.5, 0.25, SMALLEST_SCALE, SMALLEST_SCALE, 2 * SMALLEST_SCALE, SMALLEST_SCALE]
    slope = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    expected, = torch.autograd.grad(acting, scale, slope)
    assert effective_scale_backward(slope, scale.detach()).tolist() == expected.tolist() == [1, -2, 0, 0, 5, 0]


def test_a_zero_point_acts_as_the_nearest_code_ties_to_even():
    assert effective_zero_point(torch.tensor([0.5, 1.5, -2.4, 99.0]), -8, 7).tolist() == [0.0, 2.0, -2.0, 7.0]


def test_a_zero_point_that_is_not_learned_acts_as_it_is():
    zero = torch.tensor([3, 200], dtype=torch.int32)
    assert effective_zero_point(zero, -8, 7) is zero
