"""Biases of stacks: which are found, and that each expert's outputs get their mean in float."""

import pytest
import torch
from torch import nn

import qtk
from qtk.layerwise.weighted_layers import weighted_layers

EXPERTS, WIDTH, HIDDEN = 3, 8, 6


class Biased(nn.Module):
    """A stack [experts, in, out] with a bias for each expert, read by the ids of the rows' experts."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN))
        self.up_bias = nn.Parameter(torch.randn(EXPERTS, HIDDEN))

    def forward(self, x):
        expert = self.gate(x).argmax(-1)
        return self.product(x, expert)

    def product(self, x, expert):
        return torch.bmm(x.unsqueeze(1), self.up[expert]).squeeze(1) + self.up_bias[expert]


class Dispatched(Biased):
    """All experts on all rows."""

    def product(self, x, expert):
        every = x.expand(EXPERTS, -1, -1) @ self.up + self.up_bias[:, None]
        return (every * nn.functional.one_hot(expert, EXPERTS).T[..., None]).sum(0)


class ByPosition(Biased):
    """What is added depends on the row's place, not on its expert."""

    def product(self, x, expert):
        return torch.bmm(x.unsqueeze(1), self.up[expert]).squeeze(1) + self.up_bias[torch.arange(len(x)) % EXPERTS]


class ReadTwice(Biased):
    def product(self, x, expert):
        y = torch.bmm(x.unsqueeze(1), self.up[expert]).squeeze(1)
        return y * (y + self.up_bias[expert])


def simulation(model):
    torch.manual_seed(0)
    x = 4 * torch.randn(90, WIDTH) + 1
    sim = qtk.QuantSim(model.eval(), x, weight_bits=3, activation_bits=None, config={
        "version": 1, "extends": "default", "rules": [{"match": {"path": "gate"}, "weight": "float"}]})
    sim.compute_encodings(None, progress=False)
    return sim, x


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("kind", [Biased, Dispatched])
@pytest.mark.parametrize("methods", [["bias_correction"], ["gptq", "bias_correction"]])
def test_the_outputs_of_each_expert_get_their_mean_in_float(kind, methods):
    torch.manual_seed(0)
    model = kind()
    sim, x = simulation(model)
    before = model.up_bias.detach().clone()
    qtk.apply_layerwise(sim, [x], methods, progress=False, options=qtk.LayerwiseOptions(holdout=0.0))
    expert, weight = model.gate(x).argmax(-1), sim.quantizers["up"](sim.model.get_parameter("up")).detach()
    bias = sim.model.get_parameter("up_bias").detach()
    for index in range(EXPERTS):
        rows = x[expert == index] if kind is Biased else x
        shift = (rows.double() @ (model.up[index].double() - weight[index].double())).mean(0)
        torch.testing.assert_close(bias[index].double(), before[index].double() + shift, rtol=1e-4, atol=1e-5)
        assert shift.abs().max() > 1e-3
    assert torch.equal(model.up_bias, before)


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("kind", [ByPosition, ReadTwice])
def test_what_is_no_bias_of_an_expert_is_left(kind):
    torch.manual_seed(0)
    sim, _ = simulation(kind())
    (layer,), _ = weighted_layers(sim.model, sim.plan)
    assert (layer.name, layer.matrices, layer.bias, layer.bias_moves) == ("up", EXPERTS, None, ())
