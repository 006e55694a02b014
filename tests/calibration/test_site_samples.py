"""What is kept of the values of sites, and what they lose."""

import math

import pytest
import torch
from torch import nn

import qtk
from qtk.calibration.site_samples import SiteSamples
from qtk.core.encoding import Encoding
from tests.calibration.test_width_check import said


def test_the_figures_are_those_of_the_values():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    sim = qtk.QuantSim(model, torch.randn(8, 4))
    samples = SiteSamples(sim.simulation, {})
    values = torch.cat([torch.tensor([50.0]), torch.full((999,), 0.1)])
    site = next(each for each in sim.simulation.plan if each.name == "1:out")
    samples._values[site].append(values)
    encoding = Encoding(sim.plan[site].spec, torch.tensor([0.5]), torch.tensor([0], dtype=torch.int32))
    sim.simulation.quantizers[site].load_encoding(encoding)
    (found,) = samples.unheld(sim.simulation)
    assert (found.codes, found.zeroed) == (2, 0.999)
    assert found.sqnr_db == pytest.approx(10 * math.log10((2500 + 9.99) / 9.99), rel=1e-4)


@pytest.mark.medium
def test_padding_is_no_value_of_a_site():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, mask):
            return self.linear(x).relu()

    x, mask = torch.randn(8, 16, 4), torch.ones(8, 16, dtype=torch.bool)
    mask[:, 4:] = False
    x[mask] = 0.0
    sim = qtk.QuantSim(Net().eval(), (x, mask))
    assert [row[0] for row in said(sim, [(x, mask)], valid="mask")] == ["x:input"]
    assert said(sim, [(x, mask)]) == []
