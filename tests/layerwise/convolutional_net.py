"""A small network of three layers with its simulation and data, and how far the two are apart."""

import torch
from torch import nn
from torch.nn import functional

import qtk


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 6, 3)
        self.fc1, self.fc2 = nn.Linear(54, 24), nn.Linear(24, 5)

    def forward(self, x):
        return self.fc2(functional.gelu(self.fc1(functional.relu(self.conv(x)).flatten(1))))


def problem(**settings):
    torch.manual_seed(0)
    model = Net().eval()
    data = [torch.randn(32, 2, 5, 5) + 0.5 for _ in range(4)]
    rules = [{"match": {"op": ["conv", "linear"]}, "weight": {"scheme": "min_max"}}]
    config = {"version": 1, "extends": "default", "rules": rules}
    settings = {"weight_bits": 3, "activation_bits": 8, "config": config, **settings}
    sim = qtk.QuantSim(model, data[0], **settings)
    sim.compute_encodings(data, progress=False)
    return model, sim, data


@torch.no_grad()
def lost(model, sim, data):
    return float(sum((model(x) - sim.model(x)).square().sum() for x in data))


def state(sim):
    flags = {name: (quantizer.frozen, quantizer.rewrote_weight) for name, quantizer in sim.quantizers.items()}
    return {name: value.clone() for name, value in sim.model.state_dict().items()}, flags


def same(before, after):
    return before[1] == after[1] and before[0].keys() == after[0].keys() and all(
        torch.equal(value, after[0][name]) for name, value in before[0].items())
