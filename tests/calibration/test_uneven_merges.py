"""What is uneven, and what reads it, of graphs with quantizers."""

import pytest
import torch
from torch import nn

import qtk
from qtk.calibration.uneven_merges import UnevenValues, uneven_values


class Largest:
    """Samples of which the largest values are known."""

    def __init__(self, **largest):
        self.values = {name.replace("__", ":"): value for name, value in largest.items()}
        self.members = {}

    def largest(self, site):
        return self.values.get(site.name, 0.0)


class Read(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.read, self.conv, self.other = read, nn.Conv2d(4, 3, 1), nn.Conv2d(2, 3, 1)

    def forward(self, x, y):
        return self.read(self, torch.cat([x, y], 1))


def found(read, **largest):
    x = torch.randn(2, 2, 4, 4)
    sim = qtk.QuantSim(Read(read).eval(), (x, x), config="onnxruntime")
    return uneven_values(Largest(**largest), sim.simulation)


NONE = UnevenValues((), ())


@pytest.mark.parametrize(("y", "expected"), [(0.7, NONE), (0.6, UnevenValues(("concat:out", "mul:out"), ()))])
def test_operands_are_uneven_above_a_ratio_of_sixteen(y, expected):
    assert found(lambda net, both: both * 0.5, x__input=10.0, y__input=y) == expected


def test_what_is_computed_from_them_channel_by_channel_is_uneven_too():
    both = {"x__input": 10.0, "y__input": 0.1}
    assert found(lambda net, both: (-both.relu()).softmax(1) * 2, **both).outputs[0] == "concat:out"
    assert "softmax:out" not in found(lambda net, both: (-both.relu()).softmax(1) * 2, **both).outputs


def test_a_product_needs_one_range_for_all_of_it_but_not_for_a_slice():
    both = {"x__input": 10.0, "y__input": 0.1}
    assert found(lambda net, both: net.conv(both * 2), **both) == NONE
    assert found(lambda net, both: net.other(both[:, :2]), **both) == UnevenValues(("concat:out",), ("other",))


def test_what_is_zero_throughout_is_no_operand():
    assert found(lambda net, both: both * 2, x__input=10.0, y__input=0.0) == NONE
