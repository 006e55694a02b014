import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import qtk
from qtk.graph.coverage import coverage

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
