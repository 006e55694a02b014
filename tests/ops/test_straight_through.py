"""The estimator around one formula, against autograd in float64."""

import pytest
import torch

from qtk.numerics import affine, straight_through
from qtk.ops.eager_function import differentiable
from qtk.ops.straight_through import StraightThrough
from tests.ops.test_fake_quantize import brute_force

SPEC = [1, -1], -8, 7


def quantizer(seen):
    """``qtk.numerics.affine.fake_quantize`` with its derivatives; ``seen`` are the wants of each backward pass."""

    def backward(*given):
        seen.append(given[-2:])
        return straight_through.fake_quantize_backward(*given)

    estimator = StraightThrough(straight_through.derivative_by_scale, lambda *given: twice(*given))
    twice = differentiable(backward, *estimator.twice)
    return differentiable(affine.fake_quantize, *estimator.once(twice))


def leaves(*, zero_point=True, needed=(True, True, True)):
    generator = torch.Generator().manual_seed(0)
    x, scale = torch.randn(4, 6, generator=generator) * 2, torch.rand(4, generator=generator) + 0.1
    zero = torch.randint(-3, 4, (4,), generator=generator).float() if zero_point else None
    return [leaf if leaf is None else leaf.requires_grad_(need)
            for leaf, need in zip((x, scale, zero), needed, strict=True)]


@pytest.mark.parametrize("needed", [(True, False, False), (False, True, False), (True, True, True)])
def test_only_needed_gradients_are_computed_and_returned(needed):
    seen, given = [], leaves(needed=needed)
    quantizer(seen)(*given, *SPEC).sum().backward()
    assert [leaf.grad is not None for leaf in given] == list(needed)
    assert seen == [needed[1:]]


@pytest.mark.parametrize("zero_point", [True, False])
def test_second_derivatives(zero_point):
    given = leaves(zero_point=zero_point)
    exact = [None if leaf is None else leaf.detach().double().requires_grad_() for leaf in given]

    def twice(result, leaves):
        leaves = [leaf for leaf in leaves if leaf is not None]
        first = torch.autograd.grad(result.pow(3).sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(grad.square().sum() for grad in first), leaves)

    found, expected = twice(quantizer([])(*given, *SPEC), given), twice(brute_force(*exact, *SPEC), exact)
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own.double(), other, rtol=1e-4, atol=1e-3 * float(other.abs().max()))


def test_the_fake_has_the_shapes_of_the_gradients():
    x, scale, zero = leaves(needed=(False, False, False))
    estimator = StraightThrough(straight_through.derivative_by_scale, straight_through.fake_quantize_backward)
    for wants in ((False, False), (True, False), (True, True)):
        grad = torch.ones_like(x, dtype=torch.bfloat16)
        real = straight_through.fake_quantize_backward(grad, x, scale, zero, *SPEC, *wants)
        fake = estimator.fake(grad, x, scale, zero, *SPEC, *wants)
        assert [(each.shape, each.dtype) for each in fake] == [(each.shape, each.dtype) for each in real]
