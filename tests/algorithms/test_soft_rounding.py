import torch

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
        ends.append(rounding.weight().detach())
    assert ends[0].tolist() == [0.5, 1.5, -0.5, 3.5, 0.0]  # 9.0 is clipped, the last is pruned
    assert ends[1].tolist() == [1.0, 2.0, 0.0, 3.5, 0.0]


def test_its_gradient_is_that_of_the_relaxed_choices():
    rounding = SoftRounding(torch.tensor([0.1, 0.6]), WeightGrid(SPEC, torch.full((2,), 2.0)), torch.tensor([0.0, 0.0]))
    rounding.weight().sum().backward()
    variable = rounding.variable.detach().double().requires_grad_()
    (2.0 * (1.2 * variable.sigmoid() - 0.1)).sum().backward()  # scale · h(V) of AdaRound's equation 23
    torch.testing.assert_close(rounding.variable.grad.double(), variable.grad)
    assert rounding.weight().tolist() == [0.0, 0.0]
