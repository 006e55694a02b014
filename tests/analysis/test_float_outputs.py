"""The error of outputs, against the formula in float64."""

import math

import pytest
import torch
from torch import nn

import qtk
from qtk.analysis.float_outputs import FloatOutputs, sqnr_db
from qtk.errors import CalibrationError

BATCHES = torch.randn(6, 32, 16, generator=torch.Generator().manual_seed(0)).unbind(0)


@pytest.mark.medium
def test_masked_scores_are_infinite_in_float_too():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 4)

        def forward(self, x):
            return self.linear(x).masked_fill(torch.tensor([False, True, False, False]), float("-inf"))

    _, account = qtk.quantize(Masked().eval(), BATCHES, progress=False)
    assert account.reached
    assert 20 < account.best.sqnr_db < 80


class Pair(nn.Module):
    """Two outputs in float of different power, and one of integers."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x):
        y = x * self.weight
        return {"first": y, "rest": (y.sum(1) * 1000, y.argmax(1))}


class Constant(nn.Module):
    """Returns one value whatever it is called with."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, x):
        return self.value


def pairs(rows):
    torch.manual_seed(0)
    return [torch.randn(rows, 3) for _ in range(3)]


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_the_error_is_the_mean_of_the_relative_errors_of_the_outputs(rows):
    batches, weight = pairs(rows), torch.tensor([1.0, -2.0, 0.5])
    found = FloatOutputs(Pair(weight), batches, None).error(Pair(weight + 0.25))
    x = torch.cat(batches).double()
    expected, simulated = x * weight.double(), x * (weight.double() + 0.25)
    first = (simulated - expected).square().sum() / expected.square().sum()
    rest = (simulated.sum(1) - expected.sum(1)).square().sum() / expected.sum(1).square().sum()
    assert found == pytest.approx(float(first + rest) / 2, rel=1e-5)
    assert sqnr_db(found) == pytest.approx(-10 * math.log10(found))


def test_the_power_is_the_sum_of_the_squares_that_are_finite():
    x = torch.tensor([[3.0, math.inf, 4.0], [math.nan, 0.0, -12.0]])
    assert FloatOutputs(nn.Identity(), [x, x[:1]], None).power == 9 + 16 + 144 + 9 + 16


@pytest.mark.parametrize(("simulated", "error"), [
    ([3.0, -math.inf, 4.0], 0.0), ([3.0, 7.0, 4.0], 0.0), ([3.0, math.nan, 4.0], 0.0), ([3.0, 0.0, 5.0], 1 / 25),
    ([math.nan, 0.0, 4.0], math.inf), ([math.inf, 0.0, 4.0], math.inf),
])
def test_only_what_is_finite_in_float_counts_and_must_be_finite_then(simulated, error):
    expected = FloatOutputs(nn.Identity(), [torch.tensor([3.0, -math.inf, 4.0])], None)
    found = expected.error(Constant(torch.tensor(simulated)))
    assert found == pytest.approx(error)
    assert math.isfinite(sqnr_db(found)) == (found not in (0.0, math.inf))


@pytest.mark.parametrize(("simulated", "error"), [(0.0, 0.0), (1e-30, math.inf)])
def test_an_error_of_zeros_is_none_or_infinite(simulated, error):
    zeros = FloatOutputs(nn.Identity(), [torch.zeros(5)], None)
    assert zeros.power == 0
    assert zeros.error(Constant(torch.full((5,), simulated))) == error


def test_other_shapes_and_outputs_that_cannot_be_compared_are_refused():
    outputs = FloatOutputs(nn.Identity(), [torch.ones(2, 3)], None)
    with pytest.raises(CalibrationError, match=r"shapes \[\(3, 2\)\], the float model of \[\(2, 3\)\]"):
        outputs.error(Constant(torch.ones(3, 2)))
    for value in (torch.ones(2, dtype=torch.int64), torch.full((2,), math.nan), torch.zeros(0), None):
        with pytest.raises(CalibrationError, match="no finite output in floating point"):
            FloatOutputs(Constant(value), [torch.ones(2)], None)


def test_a_function_that_runs_the_model_says_what_counts():
    batches = [(torch.ones(2), 3.0), (torch.ones(2), 4.0)]
    outputs = FloatOutputs(nn.Identity(), batches, lambda model, batch: model(batch[0]) * batch[1])
    assert outputs.power == 2 * (9 + 16)
    assert outputs.error(Constant(torch.tensor([1.0, 1.5]))) == pytest.approx(0.25 * 25 / 50)


class Words(nn.Module):
    def forward(self, x, mask):
        return x * 1.0, (x * mask[..., None]).sum(1)


@pytest.mark.medium
def test_padding_does_not_count():
    x, mask = torch.tensor([[[1.0], [2.0]], [[3.0], [50.0]]]), torch.tensor([[1, 1], [1, 0]])
    prepared = qtk.prepare_model(Words(), (x, mask))
    outputs = FloatOutputs(prepared, [(x, mask)], None, "mask")
    assert outputs.power == (1 + 4 + 9) + (9 + 9)  # the sums have no tokens
    assert outputs.error(prepared) == 0
    twice = qtk.prepare_model(Twice(), (x, mask))
    assert outputs.error(twice) == pytest.approx((4 / 14 + 0) / 2)


class Twice(Words):
    """Wrong by 2 where a token counts, and by more where none does."""

    def forward(self, x, mask):
        wrong = torch.tensor([[[0.0], [2.0]], [[0.0], [700.0]]])
        return x + wrong, (x * mask[..., None]).sum(1)
