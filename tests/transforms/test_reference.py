import math

import pytest
import torch
from torch import nn

import qtk
from qtk.calls.calls import Call
from qtk.transforms.reference import OriginalOutputs, change
from qtk.transforms.steps import ScaleParameter, make


class Amplifying(nn.Module):
    """The last bit of a float32 number in front of the sine moves the result by about 1e-3."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.last((1e4 * self.first(x)).sin())


def compared(model, dtype, *steps):
    torch.manual_seed(0)
    model, x = model.eval().to(dtype), torch.randn(64, 6, dtype=dtype)
    prepared = qtk.prepare_model(model, x)
    reference = OriginalOutputs(prepared, Call((x,), {}, None))
    make(prepared, steps)
    return reference.compare(prepared)


def scaled(name, factor):
    return ScaleParameter(name, torch.tensor(factor, dtype=torch.float64))


def test_rounding_that_the_model_amplifies_is_no_change():
    there_and_back = [scaled("first.weight", factor) for factor in (1.7, 1 / 1.7)]
    difference, same = compared(Amplifying(), torch.float32, *there_and_back)
    assert difference > 1e-4
    assert same


@pytest.mark.parametrize("factor", [1 + 1e-3, 1 + 1e-7])
def test_another_function_is_none_where_rounding_is_as_large(factor):
    difference, same = compared(Amplifying(), torch.float32, scaled("first.weight", factor))
    assert difference > 1e-4
    assert not same


@pytest.mark.medium
def test_factors_that_lose_the_numbers_are_found_in_the_dtype_of_the_model():
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    names = "0.weight", "0.bias", "2.weight"
    steps = [scaled(name, factor) for name, factor in zip(names, (1e-44, 1e-44, 1e44), strict=True)]
    assert not compared(model, torch.float32, *steps)[1]
    assert compared(model, torch.float64, *steps)[1]


class Labels(nn.Module):
    """Its outputs are integers, and complex numbers."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        y = self.layer(x)
        return y.argmax(1), torch.complex(y[:, :3], y[:, 3:])


@pytest.mark.parametrize(("factor", "same"), [(-1.0, False), (3.0, False), (1.0, True)])
def test_outputs_that_are_no_real_numbers_are_compared_too(factor, same):
    assert compared(Labels(), torch.float32, scaled("layer.weight", factor))[1] is same


def test_integers_may_flip_by_rounding_alone():
    ones = torch.ones(8, dtype=torch.int64)
    flipped = ones.clone()
    flipped[0] = 2
    assert change([ones], [flipped]) == (1 / 8, False)
    assert change([ones], [ones.clone()]) == (0.0, True)
    there_and_back = [scaled("layer.weight", factor) for factor in (3.0, 1 / 3)]
    assert compared(Labels(), torch.float32, *there_and_back)[1]


def test_the_change_is_relative_to_the_largest_output():
    a = [torch.tensor([100.0, 1.0]), 3, torch.tensor([1])]
    assert change(a, [torch.tensor([100.0, 1.005]), 4, torch.tensor([1])]) == (pytest.approx(5e-5, rel=1e-2), True)
    assert change(a, [torch.tensor([100.0, 1.02]), 3, torch.tensor([1])])[1] is False


@pytest.mark.parametrize("after", [torch.tensor([math.nan]), torch.tensor([math.inf]), torch.zeros(2)])
def test_what_cannot_be_compared_is_an_infinite_change(after):
    assert change([torch.ones(1)], [after]) == (math.inf, False)


def test_equal_infinities_and_nans_are_no_change():
    value = torch.tensor([math.nan, -math.inf, 1.0])
    assert change([value], [value.clone()]) == (0.0, True)
    assert change([torch.zeros(2)], [torch.zeros(2)]) == (0.0, True)
    assert change([torch.ones(1)], []) == (math.inf, False)


class Rows(nn.Module):
    """Takes whole groups of ``groups`` rows."""

    def __init__(self, groups):
        super().__init__()
        self.fc, self.groups, self.seen = nn.Linear(3, 3), groups, []

    def forward(self, x):
        if not torch.compiler.is_exporting():
            self.seen.append(len(x))
        return self.fc(x).view(-1, self.groups, 3)


@pytest.mark.parametrize(("groups", "rows"), [(1, 2), (2, 2), (8, 16)])
def test_of_a_large_example_a_few_rows_are_compared_if_the_model_takes_them(groups, rows):
    model, x = Rows(groups).eval(), torch.randn(16, 3)
    prepared = qtk.prepare_model(model, x)
    reference = OriginalOutputs(prepared, Call((x,), {}, None))
    assert reference._calls[0].args[0].shape == (rows, 3)
    assert torch.equal(reference._calls[0].args[0], x[:rows])
    assert reference.compare(prepared) == (0.0, True)
    make(prepared, [ScaleParameter("fc.bias", torch.tensor([1.0, 1.0, 1.01]))])
    assert not reference.compare(prepared)[1]
    assert len(reference._calls[0].args[0]) == 16  # rows that differ do not tell why
