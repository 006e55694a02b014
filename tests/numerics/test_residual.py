"""The reference of the residual, against the formulas in float64."""

import pytest
import torch

from qtk.numerics import residual
from tests.kernels import conformance


class TestReference(conformance.ResidualConformance):
    with_residual = staticmethod(residual.fake_quantize)
    residual_backward = staticmethod(residual.fake_quantize_backward)


def test_the_residual_of_a_fixed_range_holds_no_gradient_of_it():
    _, kept = residual.fake_quantize(torch.randn(4), torch.ones(1), None, (), -8, 7, False)
    with pytest.raises(ValueError, match="learned range"):
        residual.fake_quantize_backward(torch.ones(4), kept, torch.ones(1), None, (), -8, 7, True, False)


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("zero_point", [None, torch.tensor([-8]), torch.tensor([0]), torch.tensor([7])])
def test_of_a_relu_it_knows_where_it_was_positive(zero_point, learned):
    x = torch.tensor([-1.0, 0.0, 1e-30, 0.2, 0.25, 0.5, 3.0, 1e30, torch.inf, torch.nan]).relu()
    _, kept = residual.fake_quantize(x, torch.tensor([0.25]), zero_point, (), -8, 7, learned)
    for dtype in (torch.float32, torch.bfloat16):
        positive = residual.is_positive(kept, dtype)
        assert positive.dtype == dtype
        assert (positive > 0).tolist() == [False, False] + [True] * 8
