import pytest
import torch
from torch import nn

import qtk
from qtk.graph.exponents import exponent_sites


def exponents(code, *inputs):
    class Net(nn.Module):
        def forward(self, *tensors):
            return code(*tensors)

    sim = qtk.QuantSim(Net().eval(), inputs)
    return set(exponent_sites(sim.model, lambda name: name.startswith("mul")))


X, Y = torch.rand(2, 4), torch.rand(2, 4)


@pytest.mark.medium
@pytest.mark.parametrize("name", ["exp", "exp2", "expm1", "sinh"])
def test_what_an_exponential_reads_moved_or_not(name):
    assert exponents(lambda x, y: getattr(torch, name)((x * y).reshape(4, 2)) + x.sum() + y.sum(), X, Y) == {"mul:out"}


def test_what_something_else_reads_too_is_none():
    assert exponents(lambda x, y: (z := x * y).exp() + z, X, Y) == set()
    assert exponents(lambda x, y: (x / y).exp() + x.sum() + y.sum(), X, Y) == set()  # its steps are small


def test_what_such_values_alone_are_computed_from():
    assert exponents(lambda x, y: (x * (y + 1)).exp() + x.sum(), X, Y) == {"mul:out", "add:out", "tensors_1:input"}
