import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import qtk
from qtk.graph.coverage import coverage, unknown_ops
from qtk.workflow.prepare import prepare_model

X = torch.randn(3, 8)


@pytest.mark.medium
def test_parameters_count_when_they_are_quantized():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2, bias=False))
    prepared = qtk.prepare_model(model, X)
    assert coverage(prepared) is None
    sim = qtk.QuantSim(prepared, X)
    assert coverage(sim.model) == (64 + 16) / (64 + 8 + 16 + 16)
    assert coverage(qtk.QuantSim(model, X, weight_bits=None).model) == 0.0


def test_parameters_that_a_quantized_weight_is_computed_from_count():
    assert coverage(qtk.QuantSim(weight_norm(nn.Linear(8, 4, bias=False)), X).model) == 1.0


@pytest.mark.parametrize("model", [nn.ReLU()])
def test_a_model_without_parameters_is_covered(model):
    assert coverage(qtk.QuantSim(model, X).model) == 1.0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.skipped = nn.Sequential(nn.Linear(4, 4), Lgamma())

    def forward(self, x):
        y = torch.special.i0(x) + torch.special.i0(x * 2)
        return self.skipped(y), torch.bincount(x.flatten().to(torch.int64).abs())


class Lgamma(nn.Module):
    def forward(self, x):
        return torch.lgamma(x)


def test_each_op_with_a_real_result_and_no_row_is_named_once():
    x = torch.rand(2, 4)
    assert unknown_ops(prepare_model(Net(), x, dynamic_shapes=None)) == (
        "aten.special_i0.default", "aten.lgamma.default",
    )


def test_ops_the_user_excluded_are_not_named():
    prepared = prepare_model(Net(), torch.rand(2, 4), dynamic_shapes=None, modules_to_exclude=["skipped"])
    assert unknown_ops(prepared) == ("aten.special_i0.default",)


class Delay(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("before", torch.zeros(2, 4))

    def forward(self, x):
        y = torch.lgamma(x + self.before)
        self.before = x
        return y


def test_the_read_of_a_state_is_no_op_of_the_model():
    assert unknown_ops(prepare_model(Delay(), torch.rand(2, 4))) == ("aten.lgamma.default",)
