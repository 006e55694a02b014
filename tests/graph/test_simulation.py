import dataclasses

import pytest
import torch
from torch import nn

import qtk
from qtk.graph.simulation import HasSimulation


def of(handle: HasSimulation):
    return handle.simulation


def test_a_simulation_has_a_quantizer_for_every_site_of_its_plan():
    sim = qtk.QuantSim(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), torch.randn(2, 4))
    simulation = of(sim)
    assert simulation.model is sim.model
    assert list(simulation.quantizers) == list(simulation.plan) == list(sim.plan)
    assert {site.name: quantizer for site, quantizer in simulation.quantizers.items()} == dict(sim.quantizers)
    with pytest.raises(dataclasses.FrozenInstanceError):
        simulation.model = nn.Identity()
