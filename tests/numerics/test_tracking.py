import pytest
import torch

from qtk.core.dtypes import dtype
from qtk.core.spec import QuantSpec
from qtk.numerics.ranges import choose_range
from qtk.numerics.tracking import tracked_range


def tracked(low, high, start, spec, momentum):
    scale, zero = start
    return tracked_range(low, high, scale, None if zero is None else zero.float(), momentum=momentum, qmin=spec.qmin,
                         qmax=spec.qmax)


@pytest.mark.parametrize("symmetric", [True, False])
def test_with_momentum_1_it_is_the_calibrated_range_of_the_new_extremes(symmetric):
    spec = QuantSpec(dtype("int8"), symmetric=symmetric)
    torch.manual_seed(0)
    low, high = -torch.rand(500) * torch.logspace(-30, 30, 500), torch.rand(500) * torch.logspace(-30, 30, 500)
    low[::7], high[::7], low[3], high[5] = 0.0, 0.0, 1.0, -1.0
    high[3] = 2.0
    low[5] = -2.0
    expected = choose_range(low, high, spec)
    found = tracked(low, high, choose_range(-torch.ones(500), torch.ones(500), spec), spec, 1.0)
    assert torch.equal(found[0], expected[0])
    if not symmetric:
        assert torch.equal(found[1].round(), expected[1].float())


def test_each_end_of_the_range_moves_by_the_momentum():
    spec = QuantSpec(dtype("uint8"))
    start = choose_range(torch.tensor([-1.0]), torch.tensor([254.0]), spec)
    scale, zero = tracked(torch.tensor([-3.0]), torch.tensor([508.0]), start, spec, 0.25)
    low, high = (0 - zero) * scale, (255 - zero) * scale
    assert float(low) == pytest.approx(-1.5)
    assert float(high) == pytest.approx(254 + 0.25 * 254)


@pytest.mark.parametrize("symmetric", [True, False])
def test_zeros_shrink_a_range_towards_0_and_leave_1_where_it_ends(symmetric):
    spec, nothing = QuantSpec(dtype("int8"), symmetric=symmetric), torch.zeros(1)
    start = choose_range(-torch.ones(1), torch.ones(1), spec)
    scale, zero = tracked(nothing, nothing, start, spec, 0.25)
    torch.testing.assert_close(scale, 0.75 * start[0])
    assert symmetric or torch.equal(zero.round(), start[1].float())
    assert tracked(nothing, nothing, start, spec, 1.0)[0] == 1


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_what_is_not_finite_changes_nothing(symmetric, broken):
    spec = QuantSpec(dtype("int8"), symmetric=symmetric)
    start = choose_range(-torch.ones(2), torch.ones(2), spec)
    scale, zero = tracked(torch.tensor([-2.0, -2.0]), torch.tensor([broken, 2.0]), start, spec, 0.5)
    assert scale[0] == start[0][0]
    assert scale[1] > start[0][1]
    assert zero is None or zero[0] == start[1][0]
