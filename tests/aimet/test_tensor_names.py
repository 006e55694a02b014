"""The names themselves; that the files have them is tested in tests/export/onnx/test_float_graph.py."""

import pytest
import torch
from torch import nn

import qtk
from qtk.aimet.tensor_names import tensor_names
from tests.capture.islands import simulated as island_simulated
from tests.zoo.models import ZOO
from tests.zoo.prepared import pair, slow_but


@pytest.mark.parametrize("name", slow_but(ZOO, "residual", "gru", "nested_output"))
def test_every_planned_site_has_a_name(name):
    sim = qtk.QuantSim(pair(name)[1], ZOO[name].inputs())
    assert set(tensor_names(sim.model).values()) == {site.name for site in sim.plan}


@pytest.mark.medium
def test_islands_have_names_of_sites_alone():
    sim = island_simulated("kinds")
    assert all(name == site for name, site in tensor_names(sim.model).items())


def test_an_input_that_is_returned_keeps_its_name():
    class Same(nn.Module):
        def forward(self, x):
            return x, x.relu()

    sim = qtk.QuantSim(Same(), torch.randn(2, 3))
    assert tensor_names(sim.model) == {"x": "x:input", "output_1": "relu:out"}
