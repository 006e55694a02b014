"""Layers whose weights are parts of one parameter."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qtk
from qtk.layerwise.weighted_layers import weighted_layers


class Parts(nn.Module):
    """Three projections in one parameter, cut apart by ``cut``."""

    def __init__(self, shape, cut):
        super().__init__()
        self.weight, self.cut = nn.Parameter(torch.randn(shape)), cut

    def forward(self, x):
        for part in self.cut(self.weight):
            x = torch.tanh(F.linear(x, part))
        return x


CUTS = {
    "unbind": ((3, 16, 16), lambda w: w.unbind()),
    "select": ((3, 16, 16), lambda w: [w[index] for index in range(3)]),
    "transposed": ((3, 16, 16), lambda w: [each.T for each in w.unbind()]),
}


@pytest.mark.medium
@pytest.mark.parametrize("name", CUTS)
def test_parts_of_a_parameter_are_layers_each_as_one_of_its_own(name):
    torch.manual_seed(0)
    shape, cut = CUTS[name]
    model = Parts(shape, cut).eval()
    alone = nn.Sequential(*[module for part in cut(model.weight.detach())
                            for module in (nn.Linear(16, len(part), bias=False), nn.Tanh())]).eval()
    with torch.no_grad():
        for layer, part in zip(alone[::2], cut(model.weight), strict=True):
            layer.weight.copy_(part)
    data = [torch.randn(64, 16) @ torch.randn(16, 16) * 0.1 for _ in range(3)]
    results = []
    for each in (model, alone):
        sim = qtk.QuantSim(each, data[0], weight_bits=3, activation_bits=None)
        layers, skipped = weighted_layers(sim.model, sim.plan)
        assert (len(layers), skipped) == (3, {})
        sim.compute_encodings(data, progress=False)
        before = sim.model.state_dict()
        report = qtk.apply_layerwise(sim, data, "gptq", progress=False)
        results.append((sim.model(data[0]), [(layer.before, layer.after) for layer in report.layers], before))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=1e-5)
    assert results[0][1] == [pytest.approx(pair, rel=1e-4) for pair in results[1][1]]
    assert all(after < before for before, after in results[0][1])


@pytest.mark.medium
def test_parts_that_overlap_are_left():
    class Overlapping(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 8, 8))

        def forward(self, x):
            return F.linear(F.linear(x, self.weight[0]), self.weight.unbind()[0])

    sim = qtk.QuantSim(Overlapping().eval(), torch.randn(3, 8), weight_bits=4, activation_bits=None)
    layers, skipped = weighted_layers(sim.model, sim.plan)
    assert layers == []
    assert all(reason.startswith("is computed from parameters, not one itself") for reason in skipped.values())
