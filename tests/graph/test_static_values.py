import torch
import torch.nn.functional as F
from torch import nn

import qtk
from qtk.graph.static_values import static_values


class Standardized(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.shift = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3))

    def forward(self, x):
        w = self.weight
        return F.linear(x, (w - w.mean(1, keepdim=True)) / w.std(1, keepdim=True)) + self.shift


def test_static_sites_are_computed_as_the_model_computes_them_without_inputs():
    net = Standardized().eval()
    sim = qtk.QuantSim(net, torch.randn(2, 4))
    sites = [site for site, decided in sim.plan.items() if decided.static]
    values = {site.name: value for site, value in static_values(sim.model, sites)}
    w = net.weight.detach()
    assert set(values) == {"div:out", "shift"}
    assert torch.equal(values["div:out"], (w - w.mean(1, keepdim=True)) / w.std(1, keepdim=True))
    assert torch.equal(values["shift"], net.shift)
    assert not values["div:out"].requires_grad


def test_a_second_quantizer_on_an_edge_sees_the_float_parameter():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))
            self.a = nn.Linear(4, 4)

        def forward(self, x):
            return F.linear(F.linear(x, self.weight), self.weight.t())

    config = {"version": 1, "defaults": {"weight": {"granularity": "per_channel"}}}
    net = Shared().eval()
    sim = qtk.QuantSim(net, torch.randn(2, 4), config=config, weight_bits=4)
    edges = [site for site, decided in sim.plan.items() if site.port.startswith("in[")]
    assert len(edges) == 2  # read along axis 0 by one op and along axis 1 by the other
    values = [value for _, value in static_values(sim.model, edges)]
    assert torch.equal(values[0], net.weight)
    assert torch.equal(values[1], net.weight.t())
