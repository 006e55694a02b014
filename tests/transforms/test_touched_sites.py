import torch
from torch import nn

import qtk
from qtk.channels.channel_scales import ChannelScales
from qtk.transforms.touched_sites import sites_of_parameters, sites_of_values


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.act, self.weight = nn.Linear(4, 6), nn.ReLU(), nn.Parameter(torch.randn(3, 6))

    def forward(self, x):
        return self.act(self.first(x)) @ self.weight.t().contiguous()


def names(sites):
    return {site.name for site in sites}


def test_values_between_the_parameters_that_absorb_a_factor():
    model, x = qtk.prepare_model(Net().eval(), torch.randn(5, 4)), torch.randn(5, 4)
    scales = ChannelScales(model, (x,), {})
    factors = torch.ones(scales.num_variables, dtype=torch.float64)
    factors[scales.inputs[-1].variables[2]] = 3.0
    assert names(sites_of_values(scales.scaled_values(factors))) == {
        "first:out", "act:in[0]", "act:out", "matmul:in[0]"}
    assert scales.scaled_values(torch.ones_like(factors)) == []


def test_values_computed_from_a_parameter():
    model = qtk.prepare_model(Net().eval(), torch.randn(5, 4))
    found = names(sites_of_parameters(model, {"weight"}))
    assert {"weight", "matmul:in[1]"} < found
    assert not any(name.startswith(("first", "act")) for name in found)
    assert sites_of_parameters(model, set()) == set()
