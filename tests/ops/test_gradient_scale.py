import copy

import pytest
import torch

from qtk.ops.gradient_scale import GradientScale, scale_gradient, with_zero_gradients


@pytest.mark.parametrize("factor", [0.25, 1.0])
def test_the_gradient_is_scaled_and_the_values_are_not(factor):
    x = torch.randn(3, requires_grad=True)
    y = scale_gradient(x, factor)
    assert torch.equal(y, x)
    grad, = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
    torch.testing.assert_close(grad, 3 * x**2 * factor)
    twice, = torch.autograd.grad(grad.sum(), x)
    torch.testing.assert_close(twice, 6 * x.detach() * factor**2)  # the inner one passes the scaled path, too


def test_without_gradients_nothing_is_added_to_the_graph():
    x = torch.randn(3, requires_grad=True)
    with torch.no_grad():
        assert scale_gradient(x, 0.5) is x


@pytest.mark.parametrize("given", [1.0, torch.inf])
def test_zero_gradients_are_gradients(given):
    x, held, other = (torch.randn(3, requires_grad=True) for _ in range(3))
    result = with_zero_gradients(x * 2, held, None, other)
    assert torch.equal(result, x * 2)
    (result * given).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2 * given))
    assert torch.equal(held.grad, torch.zeros(3))
    assert torch.equal(other.grad, torch.zeros(3))


def test_n_counts_the_elements_of_a_sample_that_share_a_scale():
    for shape, scales, qmax, static, elements in (
        ((8, 3, 5), 1, 127, False, 15), ((8, 3, 5), 8, 7, True, 15), ((8, 3, 5), 3, 7, False, 5),
        ((6,), 1, 7, False, 6), ((0, 3), 1, 7, True, 1),
    ):
        factor = GradientScale.LSQ.factor(shape, scales, qmax, static=static)
        assert factor == pytest.approx((elements * qmax) ** -0.5)
    assert GradientScale.NONE.factor((8,), 1, 7, static=True) == 1.0
    assert copy.deepcopy(GradientScale.NONE) is GradientScale.NONE
