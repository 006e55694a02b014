import torch
from torch import nn

import qtk
from qtk.analysis.simulated_values import SimulatedValues
from qtk.export.simulated_sites import simulated_sites, step_of
from qtk.quantizers.quantizer import Quantizer

INPUTS = torch.randn(4, 8)


CODES = {"version": 1, "rules": [{"match": {"op": "concat"}, "output": {"bits": 8}}]}
"""A concatenation is quantized, whatever reads it."""


class Shared(nn.Module):
    """Three values with one encoding, because they are concatenated."""

    def forward(self, x):
        return torch.cat([x * 2, torch.relu(x)], -1)


def calibrated(model, **options):
    sim = qtk.QuantSim(model.eval(), INPUTS, **options)
    sim.compute_encodings([INPUTS], progress=False)
    return sim


def test_values_of_a_shared_quantizer_are_told_apart():
    sim = calibrated(Shared(), config=CODES)
    names = [site.name for site in simulated_sites(sim.model)]
    values = SimulatedValues(sim.model, dict.fromkeys(names, 0))
    with torch.no_grad():
        output = sim.model(INPUTS)
    taken = values.take()
    assert values.take() == {}
    assert {name for name, _ in taken} == set(names)
    quantizer = sim.quantizers["mul:out"]
    assert torch.equal(taken["mul:out", 0].value, quantizer(sim.quantizers["x:input"](INPUTS) * 2))
    assert torch.equal(taken["concat:out", 0].value, output)
    values.close()
    assert not any(module._forward_hooks for module in sim.model.modules() if isinstance(module, Quantizer))


def test_a_site_that_a_file_does_not_show_hides_those_that_share_its_quantizer():
    sim = calibrated(Shared(), config=CODES)
    names = [site.name for site in simulated_sites(sim.model)]
    values = SimulatedValues(sim.model, {name: 0 for name in names if name != "mul:out"})
    with torch.no_grad():
        sim.model(INPUTS)
    shared = {name for name in names if sim.quantizers[name] is sim.quantizers["mul:out"]}
    assert {name for name, _ in values.take()} == set(names) - shared
    values.close()


def test_the_step_is_the_scale_that_broadcasts():
    sim = calibrated(nn.Linear(8, 4))
    quantizer = sim.quantizers["linear:out"]
    value = torch.zeros(4, 4)
    assert torch.equal(step_of(quantizer, value).expand(4, 4), quantizer.scale.expand(4, 4))
    assert step_of(None, value) is None
    weight = sim.quantizers["weight"]
    assert torch.equal(step_of(weight, torch.zeros(4, 8)).expand(4, 8), weight.scale[:, None].expand(4, 8))


def test_a_dynamic_step_comes_from_the_value_before():
    sim = calibrated(nn.Linear(8, 4), config={
        "version": 1, "defaults": {"activation": {"bits": 8, "symmetric": False, "dynamic": True}},
    })
    quantizer = sim.quantizers["input:input"]
    expected = (max(INPUTS.max().item(), 0.0) - min(INPUTS.min().item(), 0.0)) / 255
    step = step_of(quantizer, quantizer(INPUTS), INPUTS)
    assert torch.allclose(step.expand(4, 8), torch.full((4, 8), expected))
    assert step_of(quantizer, INPUTS) is None
