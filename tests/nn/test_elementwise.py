"""Modules of one op against the formula in their docstring, in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qtk.nn.elementwise import Add, Blend, Linear, Multiply, SumOfProducts

FORMULAS = {
    Add: lambda a, b: a + b,
    Multiply: lambda a, b: a * b,
    SumOfProducts: lambda a, b, c, d: a * b + c * d,
    Blend: lambda new, old, share: share * old + (1 - share) * new,
}


@pytest.mark.parametrize("kind", FORMULAS)
def test_computes_its_formula_with_gradients(kind):
    torch.manual_seed(0)
    formula = FORMULAS[kind]
    inputs = [torch.rand(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(formula.__code__.co_argcount)]
    found, expected = kind()(*inputs), formula(*inputs)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)
    ours, written = (torch.autograd.grad(result.square().sum(), inputs) for result in (found, expected))
    torch.testing.assert_close(ours, written, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("kind", [Add, Multiply])
def test_broadcasts(kind):
    a, b = torch.randn(3, 1), torch.randn(4)
    assert torch.equal(kind()(a, b), FORMULAS[kind](a, b))


@pytest.mark.parametrize("bias", [None, torch.arange(3.0)])
def test_linear_takes_its_parameters_as_arguments_and_has_none(bias):
    module, x, weight = Linear(), torch.randn(2, 5, 4), torch.randn(3, 4)
    assert torch.equal(module(x, weight, bias), F.linear(x, weight, bias))
    assert not list(module.parameters())


@pytest.mark.parametrize("kind", [Linear, *FORMULAS])
def test_holds_no_state(kind):
    assert isinstance(kind(), nn.Module)
    assert not kind().state_dict()
