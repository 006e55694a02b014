"""Against the algorithm as it is written down: one row and one column at a time, in float64."""

import pytest
import torch

from qtk.algorithms import gptq as module
from qtk.algorithms.cholesky import PANEL
from qtk.algorithms.hessian_factor import HessianFactor, column_order
from qtk.algorithms.weight_grid import WeightGrid
from qtk.core.dtypes import dtype
from qtk.core.granularity import WHOLE
from qtk.core.spec import QuantSpec
from qtk.errors import CalibrationError
from qtk.numerics.affine import expand
from qtk.ops.fake_quantize import fake_quantize

OUT, WIDTH, ROWS = 5, 24, 200
BLOCKS = {"tensor": (), "channel": (1, WHOLE), "block": (1, 8), "rows": (5, 8)}


def problem(asymmetric, block_size, dead=False):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(OUT, WIDTH, generator=generator)
    mixing = torch.randn(WIDTH, WIDTH, generator=generator).double()
    x = torch.randn(ROWS, WIDTH, generator=generator).double() @ mixing
    if dead:
        x[:, 3] = 0
    shape = {(): (1,), (1, WHOLE): (OUT,), (1, 8): (OUT, 3), (5, 8): (1, 3)}[block_size]
    scale = torch.rand(shape, generator=generator) * 0.2 + 0.25
    zero = torch.randint(3, 12, shape, generator=generator).int() if asymmetric else None
    codes = (0, 15) if asymmetric else (-8, 7)
    return weight, x, scale, zero, codes


def grid_of(weight, scale, zero, block_size):
    steps = expand(scale, weight.shape, block_size).expand(weight.shape)
    zeros = None if zero is None else expand(zero, weight.shape, block_size).expand(weight.shape).int()
    return WeightGrid(QuantSpec(dtype("int4" if zero is None else "uint4"), symmetric=zero is None), steps, zeros)


def gptq(weight, hessian, grid, linear=None, **settings):
    """One group of outputs."""
    return module.gptq(weight[None], hessian[None], grid[None], None if linear is None else linear[None], **settings)[0]


def factor_of(hessian):
    return HessianFactor.of(hessian[None], column_order(hessian[None], act_order=True), 0.01, torch.float64)


def textbook(weight, gram, scale_of, zero_of, codes, damping, order):
    width = len(gram)
    damped = gram.clone()
    dead = gram.diagonal() == 0
    damped[dead, dead] = 1
    damped += torch.eye(width, dtype=torch.float64) * damping * gram.diagonal().mean()
    inverse = torch.linalg.inv(damped[order][:, order])
    factor = torch.linalg.cholesky(inverse).T
    result = torch.zeros(weight.shape, dtype=torch.float64)
    for row in range(len(weight)):
        left = weight[row].double().clone()
        left = left[order]
        for i in range(width):
            column = int(order[i])
            step, zero = scale_of[row, column], zero_of[row, column]
            code = min(max(float(torch.round(left[i].float() / step)) + float(zero), codes[0]), codes[1])
            near = (code - float(zero)) * float(step)
            error = (left[i] - near) / factor[i, i]
            result[row, column] = near
            for j in range(i + 1, width):
                left[j] -= error * factor[i, j]
    return result


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("dead", [False, True])
def test_the_textbook(name, asymmetric, act_order, dead):
    weight, x, scale, zero, codes = problem(asymmetric, BLOCKS[name], dead)
    gram = x.T @ x
    own = gptq(
        weight, gram, grid_of(weight, scale, zero, BLOCKS[name]), act_order=act_order, columns_at_once=7
    )
    width = {"tensor": WIDTH, "channel": WIDTH, "block": 8, "rows": 8}[name]

    def spread(values):
        if name == "tensor":
            return values.reshape(1, 1).expand(OUT, WIDTH)
        return values.reshape(-1, WIDTH // width).repeat_interleave(width, 1).expand(OUT, WIDTH)

    order = gram.diagonal().argsort(descending=True, stable=True) if act_order else torch.arange(WIDTH)
    zeros = torch.zeros(OUT, WIDTH) if zero is None else spread(zero)
    expected = textbook(weight, gram, spread(scale), zeros, codes, 0.01, order)
    torch.testing.assert_close(own.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", BLOCKS)
def test_better_than_rounding_to_nearest_and_on_the_grid(name):
    weight, x, scale, _, codes = problem(False, BLOCKS[name])
    nearest = fake_quantize(weight, scale, None, BLOCKS[name], *codes)
    own = gptq(weight, x.T @ x, grid_of(weight, scale, None, BLOCKS[name]))
    losses = [float((x @ (weight - other).double().T).square().sum()) for other in (own, nearest)]
    assert losses[0] < 0.8 * losses[1]
    torch.testing.assert_close(fake_quantize(own, scale, None, BLOCKS[name], *codes), own, rtol=0, atol=0)


def test_inputs_never_seen_leave_the_nearest_to_their_weights():
    weight, x, scale, _, codes = problem(False, (1, WHOLE), dead=True)
    own = gptq(weight, x.T @ x, grid_of(weight, scale, None, (1, WHOLE)))
    assert torch.equal(own[:, 3], fake_quantize(weight, scale, None, (1, WHOLE), *codes)[:, 3])
    assert bool((own[:, 3] != 0).any())


def test_how_many_columns_go_at_once_makes_no_difference():
    weight, x, scale, _, _ = problem(False, (1, WHOLE))
    spec = weight, x.T @ x, grid_of(weight, scale, None, (1, WHOLE))
    found = [gptq(*spec, columns_at_once=count) for count in (1, 5, 24, 99)]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


def test_inputs_that_say_nothing_about_each_other_leave_the_nearest():
    weight, _, scale, _, codes = problem(False, (1, WHOLE))
    own = gptq(
        weight, torch.eye(WIDTH, dtype=torch.float64), grid_of(weight, scale, None, (1, WHOLE))
    )
    assert torch.equal(own, fake_quantize(weight, scale, None, (1, WHOLE), *codes))


def test_what_makes_no_sense_is_refused():
    weight, _, scale, _, _ = problem(False, (1, WHOLE))
    broken = torch.full((WIDTH, WIDTH), 5.0, dtype=torch.float64) - 10 * torch.eye(WIDTH, dtype=torch.float64).flip(0)
    with pytest.raises(CalibrationError, match="too correlated"):
        gptq(weight, broken, grid_of(weight, scale, None, (1, WHOLE)), damping=1e-9)


@pytest.mark.parametrize("act_order", [False, True])
def test_a_linear_term_moves_the_weights_to_those_of_least_error_first(act_order):
    weight, x, scale, _, codes = problem(False, (1, WHOLE))
    gram = x.T @ x
    linear = 40 * torch.randn(OUT, WIDTH, generator=torch.Generator().manual_seed(3)).double()
    own = gptq(
        weight.double(), gram, grid_of(weight, scale, None, (1, WHOLE)), linear, act_order=act_order, columns_at_once=7
    )
    damped = gram + 0.01 * gram.diagonal().mean() * torch.eye(WIDTH)
    order = gram.diagonal().argsort(descending=True, stable=True) if act_order else torch.arange(WIDTH)
    scales = scale[:, None].expand(OUT, WIDTH)
    expected = textbook(
        weight.double() + linear @ torch.linalg.inv(damped), gram, scales, torch.zeros(OUT, WIDTH), codes, 0.01, order
    )
    torch.testing.assert_close(own, expected, rtol=1e-6, atol=1e-6)
    assert not torch.equal(own, gptq(weight.double(), gram, grid_of(weight, scale, None, (1, WHOLE))))


@pytest.mark.parametrize("act_order", [False, True])
def test_groups_are_rounded_together_as_each_alone(act_order):
    problems = [problem(True, (1, WHOLE)), problem(False, (1, WHOLE), dead=True)]
    grams = torch.stack([x.T @ x * (index + 1) for index, (_, x, *_) in enumerate(problems)])
    weights = torch.stack([problems[0][0], problems[1][0].flip(0)])
    grids = [grid_of(weight, problems[0][2], problems[0][3], (1, WHOLE)) for weight in weights]
    both = WeightGrid(
        grids[0].spec, torch.stack([each.scale for each in grids]), torch.stack([each.zero_point for each in grids])
    )
    together = module.gptq(weights, grams, both, act_order=act_order)
    for group in range(2):
        assert torch.equal(together[group], gptq(weights[group], grams[group], grids[group], act_order=act_order))


def test_a_hessian_that_float32_cannot_factorize_is_factorized_in_float64():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(64, 1, generator=generator) @ (1 + torch.rand(1, 512, generator=generator))
    gram = (x.double().T @ x.double()).float()
    damped = gram + 1e-5 * gram.diagonal().mean() * torch.eye(512)
    assert torch.linalg.cholesky_ex(damped)[1] > 0
    weight = torch.randn(2, 512, generator=generator)
    grid = grid_of(weight, torch.full((2,), 0.3), None, (1, WHOLE))
    found = gptq(weight, gram, grid, damping=1e-5), grid.nearest(weight)
    losses = [(x @ (weight - rounded).T).square().sum() for rounded in found]
    assert losses[0] < 1e-3 * losses[1]


@pytest.mark.parametrize("columns_at_once", [7, WIDTH])
def test_targets_cost_nothing_while_columns_still_to_come_are_free(columns_at_once):
    weight, x, scale, _, _ = problem(False, (1, WHOLE))
    hessian, moved = x.T @ x, torch.randn(WIDTH, OUT, generator=torch.Generator().manual_seed(1)).double()
    linear = 0.01 * hessian @ moved
    feedback = module.Feedback.of(weight.double()[None], factor_of(hessian), linear.T[None])
    rounded = feedback.rounded(grid_of(weight, scale, None, (1, WHOLE))[None], columns_at_once)
    found, target, power = (feedback.in_place(each)[0] for each in (
        rounded.weight, rounded.weight + rounded.missing, feedback.factor.power))
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(WIDTH, dtype=torch.float64)
    change, order = weight.double() - found, feedback.factor.order[0]
    for at, column in enumerate(order.tolist()):
        free, fixed = order[: at + 1], order[at + 1 :]
        right = linear[free].T + change[:, fixed] @ damped[fixed][:, free]
        best = -torch.linalg.solve(damped[free][:, free], right.T).T
        torch.testing.assert_close(target[:, column], weight.double()[:, column] - best[:, -1])
        kept = 1 / torch.linalg.inv(damped[free][:, free])[-1, -1]  # of the power of this column
        torch.testing.assert_close(power[0, column], kept)
    least = -(linear.T @ torch.linalg.inv(damped) * linear.T).sum(1)
    error = ((change @ damped + 2 * linear.T) * change).sum(1)
    torch.testing.assert_close(rounded.lost[0], error - least)


@pytest.mark.parametrize("columns_at_once", [100, 128, 300])
def test_what_is_missing_is_right_across_panels_of_the_factor(columns_at_once):
    columns, generator = PANEL + 44, torch.Generator().manual_seed(0)
    x = torch.randn(2 * columns, columns, generator=generator).double()
    weight, hessian = torch.randn(3, columns, generator=generator).double(), x.T @ x
    feedback = module.Feedback.of(weight[None], factor_of(hessian), None)
    grid = grid_of(weight.float(), torch.full((3,), 0.4), None, (1, WHOLE))[None]
    rounded = feedback.rounded(grid, columns_at_once)
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(columns, dtype=torch.float64)
    change = weight - feedback.in_place(rounded.weight)[0]
    torch.testing.assert_close(rounded.lost[0], ((change @ damped) * change).sum(1))
