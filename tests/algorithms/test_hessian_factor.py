"""Factors of damped Hessians against LAPACK's in float64."""

import pytest
import torch

from qtk.algorithms.cholesky import PANEL
from qtk.algorithms.hessian_factor import HessianFactor, column_order

DAMPING = 0.02


def hessians(columns):
    x = torch.randn(2, 2 * columns, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[0, :, 3] = 0
    return x.mT @ x


@pytest.mark.parametrize("columns", [24, PANEL + 44])
@pytest.mark.parametrize("act_order", [False, True])
def test_each_factor_is_that_of_its_damped_hessian_in_order(columns, act_order):
    hessian = hessians(columns)
    order = column_order(hessian, act_order)
    found = HessianFactor.of(hessian, order, DAMPING, torch.float64)
    assert torch.equal(hessian, hessians(columns))  # unchanged
    for each, own, lower, power in zip(hessian, order, found.lower, found.power, strict=True):
        damped = each + torch.diag(DAMPING * each.diagonal().mean() + (each.diagonal() == 0))
        assert torch.equal(lower.diagonal(), torch.ones(columns, dtype=torch.float64))
        torch.testing.assert_close(lower * power.sqrt(), torch.linalg.cholesky(damped[own][:, own]))
        power = each.diagonal()[own]
        assert torch.equal(power, power.sort().values) if act_order else torch.equal(own, own.sort(descending=True)[0])


def test_values_are_solved_by_the_factor():
    hessian = hessians(24)
    factor = HessianFactor.of(hessian, column_order(hessian, act_order=True), DAMPING, torch.float64)
    values = torch.randn(2, 5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close((factor.solved(values) * factor.power) @ factor.lower.mT, values)
