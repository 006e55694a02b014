import math

import pytest
import torch
from torch import nn

import qtk
from qtk.quantizers.modes import in_mode


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).eval()


def test_errors_are_those_of_two_separate_runs(net):
    batches = [torch.randn(7, 6) for _ in range(3)]
    sim = qtk.QuantSim(net, batches[0], weight_bits=4)
    sim.compute_encodings(batches, progress=False)
    found = {error.site: error for error in sim.compare(batches, progress=False)}
    with torch.no_grad():
        reference = torch.cat([net(batch) for batch in batches]).double()
        simulated = torch.cat([sim.model(batch) for batch in batches]).double()
    noise = (simulated - reference).square().sum()
    assert found["2:out"].sqnr_db == pytest.approx(float(10 * torch.log10(reference.square().sum() / noise)), abs=1e-6)
    scale = float(sim.encodings()["2:out"].scale)
    assert found["2:out"].max_error_scales == pytest.approx(float((simulated - reference).abs().max()) / scale)


@pytest.mark.parametrize("granularity", [
    {"granularity": "per_tensor"}, {"granularity": "per_channel"}, {"granularity": "per_block", "block_size": 2},
])
def test_errors_count_in_scales_of_their_own_channel(granularity):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)).eval()
    with torch.no_grad():
        net[0].weight[0] *= 100
    config = {"version": 1, "defaults": {"weight": {"symmetric": True, **granularity}}}
    sim = qtk.QuantSim(net, torch.randn(7, 6), config=config)
    sim.compute_encodings([torch.randn(7, 6)], progress=False)
    (found,) = (error for error in sim.compare([torch.randn(7, 6)], progress=False) if error.site == "0.weight")
    assert 0.3 < found.max_error_scales <= 0.5 + 1e-5


def test_values_on_the_grid_have_no_error():
    class Same(nn.Module):
        def forward(self, x):
            return x.relu()

    x = torch.arange(256.0)
    sim = qtk.QuantSim(Same(), x[:4])
    sim.compute_encodings([x], progress=False)
    for error in sim.compare([x], progress=False):
        assert error.sqnr_db == math.inf
        assert error.max_error_scales == 0.0


def test_it_leaves_modes_and_hooks_as_they_were(net):
    x = torch.randn(4, 6)
    sim = qtk.QuantSim(net, x)
    sim.compute_encodings([x], progress=False)
    sim.compare([x], progress=False)
    assert all(quantizer.mode is qtk.Mode.SIMULATE for quantizer in sim.quantizers.values())
    assert not any(quantizer._forward_hooks for quantizer in sim.quantizers.values())
    with in_mode(sim.quantizers.values(), qtk.Mode.BYPASS):
        assert math.isinf(max(error.sqnr_db for error in sim.compare([x], progress=False)))
