"""What a graph holds, by the rows of its ops."""

import pytest
import torch
from torch import nn

import qtk
from qtk.graph.graphs import contents_of
from qtk.operators.contents import Trait, contents
from qtk.operators.op_row import Mask, Precision, Product, Role
from tests.zoo.prepared import pair

CONV = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), torch.randn(2, 3, 8, 8)


class Stack(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*shape))

    def forward(self, x, positions):
        return torch.exp((x @ self.weight.view(2, 8, 4)).masked_fill(positions > 3, -1e9)).softmax(-1)


def test_kinds_families_and_columns_are_held():
    model, x = CONV
    held = contents(qtk.prepare_model(model, x).graph.nodes)
    assert {"conv2d", "conv", "relu", Role.COMPUTE, Product.CONV} <= held
    assert held.isdisjoint({"linear", Role.MERGE, None, *Trait, *Mask})


@pytest.mark.parametrize("shape", [(2, 8, 4), (16, 4)])
def test_stacks_of_matrices_integers_and_masks_are_held(shape):
    held = contents(qtk.prepare_model(Stack(*shape), (torch.randn(2, 5, 8), torch.arange(4))).graph.nodes)
    assert {Trait.STACKS, Trait.INTEGERS, Mask.MAKES, Mask.READS, Precision.EXPONENT} <= held


@pytest.mark.parametrize(("name", "expected"), [("gru", {Trait.COMPOSITES, "recurrent", "gru_cell"}),
                                                ("concatenated", {Role.MERGE, "concat"})])
def test_models_of_the_zoo(name, expected):
    held = contents_of(pair(name)[1])
    assert expected <= held


def test_a_convolution_is_no_stack_behind_its_quantizer_either():
    model, x = CONV
    sim = qtk.QuantSim(model.eval(), x)
    assert Trait.STACKS not in contents_of(sim.model)
