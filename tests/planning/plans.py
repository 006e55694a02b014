"""Plans of small models, by site name."""

import torch
import torch.nn.functional as F
from torch import nn

from qtk.config.load import load_config
from qtk.planning.planner import plan
from qtk.workflow.prepare import prepare_model

BARE = {"version": 1}
PER_CHANNEL = {"version": 1, "defaults": {"weight": {"granularity": "per_channel"}}}


def plan_of(model, inputs, config=BARE, *, weight_bits=4, activation_bits=8, scheme="min_max"):
    prepared = prepare_model(model.eval(), inputs)
    return plan(
        prepared, load_config(config), weight_bits=weight_bits, activation_bits=activation_bits, scheme=scheme
    )


def by_name(quant_plan):
    return {site.name: decided for site, decided in quant_plan.items()}


def leaders(quant_plan):
    return {site.name: decided.leader.name for site, decided in quant_plan.items() if decided.leader}


class ConvReluConv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.relu, self.conv2 = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)

    def forward(self, x):
        return self.conv2(self.relu(self.conv1(x)))


class WeightsAsInputs(nn.Module):
    """Ops whose weights are inputs of the model, one of them reshaped."""

    def forward(self, x, kernel, flat, table, bias):
        ids = torch.arange(2, device=x.device)
        return F.conv2d(x, kernel, bias), F.linear(x, flat.reshape(5, -1)), F.embedding(ids, table)


def weights_as_inputs():
    return torch.randn(2, 3, 8, 6), torch.randn(4, 3, 3, 3), torch.randn(30), torch.randn(4, 5), torch.randn(4)
