import torch

from qtk.algorithms.adaround import exponent
from qtk.algorithms.soft_rounding import SoftRounding
from qtk.algorithms.weight_grid import WeightGrid
from qtk.core.dtypes import dtype
from qtk.core.spec import QuantSpec

SPEC = QuantSpec(dtype("int4"), symmetric=True)


def test_a_choice_is_between_the_points_around_the_weight_or_next_to_the_point_in_use():
    grid = WeightGrid(SPEC, torch.full((5,), 0.5)).pruned(torch.tensor([False, False, False, False, True]))
    rounding = SoftRounding(torch.tensor([0.7, 0.7, 0.7, 9.0, 0.3]), grid, torch.tensor([0.5, 2.0, -0.5, 3.5, 0.0]))
    ends = []
    for value in (-9.0, 9.0):
        with torch.no_grad():
            rounding.variable.fill_(value)
        ends.append(rounding.rounded())
    assert ends[0].tolist() == [0.5, 1.5, -0.5, 3.5, 0.0]  # 9.0 is clipped, the last is pruned
    assert ends[1].tolist() == [1.0, 2.0, 0.0, 3.5, 0.0]


def test_what_is_undecided_falls_along_its_gradient_as_the_formula_says():
    rounding = SoftRounding(torch.tensor([0.1, 0.6]), WeightGrid(SPEC, torch.ones(2)), torch.tensor([0.0, 1.0]))
    soft = torch.tensor([0.1, 0.6])
    expected = (1 - (2 * soft - 1).abs() ** exponent(0.5)).mean()
    torch.testing.assert_close(rounding.undecided(0.5).detach(), expected)
    rounding.undecided(1.0).backward()
    assert rounding.variable.grad[0] > 0 > rounding.variable.grad[1]  # one to 0, the other to 1
