"""Against the algorithm as it is written down: one row and one column at a time, in float64."""

import pytest
import torch

from qtk.algorithms.gptq import gptq
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
    with pytest.raises(CalibrationError, match="too alike"):
        gptq(weight, broken, grid_of(weight, scale, None, (1, WHOLE)), damping=1e-9)
