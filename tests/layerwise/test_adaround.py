"""Rounding judged by what follows the layer."""

import math

import pytest
import torch
from torch import nn

import qtk
from qtk.algorithms.output_error import ActivationError
from qtk.errors import CalibrationError
from qtk.layerwise.adaround import AdaRound
from qtk.layerwise.coordinate_descent import CoordinateDescent
from qtk.layerwise.gptq import Gptq
from qtk.layerwise.weighted_layers import weighted_layers
from tests.layerwise.layers import CHANNEL, named


def layers_of(model, x):
    sim = qtk.QuantSim(model.eval(), x, weight_bits=3)
    return {layer.name: layer for layer in weighted_layers(sim.model, sim.plan)[0]}


class Followed(nn.Module):
    def __init__(self):
        super().__init__()
        self.relu, self.gelu, self.leaky, self.clamp, self.twice, self.none = (nn.Linear(4, 4) for _ in range(6))
        self.leaky_function = nn.LeakyReLU(0.3)

    def forward(self, x):
        x = torch.relu(self.relu(x))
        x = nn.functional.gelu(self.gelu(x), approximate="tanh")
        x = self.leaky_function(self.leaky(x))
        x = self.clamp(x).clamp(-0.5, 1.0)
        x = self.twice(x)
        return self.none(torch.relu(x) + x) + 1


@pytest.mark.medium
def test_the_function_that_alone_reads_the_output():
    found = layers_of(Followed(), torch.randn(3, 4))
    y = torch.linspace(-2, 2, 9)
    expected = {
        "relu": torch.relu(y), "gelu": nn.functional.gelu(y, approximate="tanh"),
        "leaky": nn.functional.leaky_relu(y, 0.3), "clamp": y.clamp(-0.5, 1.0),
    }
    for name, values in expected.items():
        assert torch.equal(found[f"{name}.weight"].activation(y), values)
    assert found["twice.weight"].activation is None
    assert found["none.weight"].activation is None


def test_the_slope_is_half_of_the_gradient():
    torch.manual_seed(0)
    rows, before = torch.randn(2, 1, 20, 5).double(), torch.randn(2, 1, 20, 3).double()
    error = ActivationError(rows, before + 0.1, before, torch.nn.functional.silu)
    change = torch.randn(2, 1, 3, 5).double().requires_grad_()
    (gradient,) = torch.autograd.grad(error.of(change).sum(), change)
    torch.testing.assert_close(error.half_gradient(change.detach()), gradient / 2)
    y, near = before + 0.1, before - rows @ change.detach().mT
    direct = (torch.nn.functional.silu(y) - torch.nn.functional.silu(near)).square().sum(-2)
    torch.testing.assert_close(error.of(change.detach()), direct)


@pytest.mark.parametrize("noise", [0.0, 0.5])
@pytest.mark.parametrize("name", ["linear", "conv"])
def test_no_output_ends_above_coordinate_descent_or_gptq(name, noise):
    given = named(name, CHANNEL, noise=noise)
    own, *others = (
        given.lost(method.apply(given.problem).weight)
        for method in (AdaRound(iterations=3), CoordinateDescent(scales=False), Gptq())
    )
    assert all(own <= other * (1 + 1e-9) for other in others)


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize(("kind", "most"), [("linear", 0.97), ("conv", 0.97), ("grouped", 1)])
def test_what_follows_the_layer_comes_closer(kind, most):
    torch.manual_seed(0)
    layer = nn.Linear(16, 8) if kind == "linear" else nn.Conv2d(4, 8, 3, groups=1 + (kind == "grouped"))
    with torch.no_grad():
        layer.bias -= 0.5  # most outputs end below 0
    model = nn.Sequential(layer, nn.ReLU()).eval()
    data = [torch.randn(64, 16) if kind == "linear" else torch.randn(48, 4, 5, 5) for _ in range(4)]
    lost = {}
    for through in (False, True):
        sim = qtk.QuantSim(model, data[0], weight_bits=2, activation_bits=None)
        sim.compute_encodings(None, progress=False)
        method = AdaRound(iterations=500, through_activation=through)
        qtk.apply_layerwise(sim, data, [method], options=qtk.LayerwiseOptions(holdout=0.0), progress=False)
        with torch.no_grad():
            lost[through] = float(sum((model(x) - sim.model(x)).square().sum() for x in data))
            weight = sim.model.get_parameter("0.weight")
            assert torch.equal(sim.quantizers["0.weight"](weight), weight)
    assert lost[True] < most * lost[False]


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"iterations": 0}, "iterations of AdaRound must be an integer from 1 to 1000000, got 0"),
     *(({name: value}, f"AdaRound needs .*{name}={value}") for name, value in (
         ("learning_rate", 0.0), ("learning_rate", -1.0), ("learning_rate", math.nan), ("warm_start", 1.0),
         ("warm_start", -0.1)))],
)
def test_settings_that_make_no_sense_are_refused(settings, said):
    with pytest.raises(CalibrationError, match=said):
        AdaRound(**settings)
