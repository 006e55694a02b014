import math

import pytest
import torch
from torch import nn

import qtk
from qtk.quantizers.modes import in_mode
from qtk.quantizers.quantizer import Mode
from tests.capture.islands import SIZES, simulated, weights
from tests.zoo.prepared import slow_but
from tests.zoo.python import PYTHON


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


@pytest.mark.medium
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


class TestOwnError:
    """The error that a site alone makes of the float model's value."""

    @pytest.fixture
    def sim(self, net):
        torch.manual_seed(1)
        batches = [torch.randn(50, 6) for _ in range(2)]
        sim = qtk.QuantSim(net, batches[0])
        sim.compute_encodings(batches, progress=False)
        return sim, batches

    def test_it_is_that_of_the_float_value_quantized_alone(self, sim, net):
        sim, batches = sim
        sim.set_range("1:out", 0.0, 0.1)
        errors = {error.site: error for error in sim.compare(batches, progress=False)}
        with torch.no_grad():
            hidden = net[1](net[0](torch.cat(batches)))
        encoding = sim.encodings()["1:out"]
        scale, zero = encoding.scale.double(), encoding.zero_point.double()
        codes = (hidden.double() / scale + zero).round()
        quantized = (codes.clamp(0, 255) - zero) * scale
        noise = (quantized - hidden.double()).square().sum()
        found = errors["1:out"]
        assert found.own_sqnr_db == pytest.approx(float(10 * torch.log10(hidden.double().square().sum() / noise)),
                                                  abs=1e-4)
        assert found.clipped == pytest.approx(float((codes > 255).double().mean()), abs=1e-6)
        assert found.clipped > 0.2
        assert found.range_filled == pytest.approx(float(hidden.max()) / 0.1, rel=0.01)

    def test_of_a_weight_it_does_not_depend_on_the_data(self, sim, net):
        sim, batches = sim
        weight, quantizer = net[0].weight.detach(), sim.quantizers["0.weight"]
        noise = (quantizer(weight) - weight).double().square().sum()
        errors = {error.site: error for error in sim.compare(batches, progress=False)}
        assert errors["0.weight"].own_sqnr_db == pytest.approx(
            float(10 * torch.log10(weight.double().square().sum() / noise)), abs=1e-6)

    def test_an_error_before_a_site_is_not_its_own(self, sim):
        sim, batches = sim
        before = {error.site: error for error in sim.compare(batches, progress=False)}
        sim.set_range("input:input", -0.01, 0.01)
        after = {error.site: error for error in sim.compare(batches, progress=False)}
        for site in before.keys() - {"input:input"}:
            assert after[site].own_sqnr_db == before[site].own_sqnr_db
        assert after["2:out"].sqnr_db < before["2:out"].sqnr_db - 20

    def test_the_site_that_makes_it_comes_first(self, sim):
        sim, batches = sim
        sim.set_range("input:input", -0.05, 0.05)
        errors = sim.compare(batches, progress=False)
        assert errors[0].site == "input:input"
        assert errors[1].own_sqnr_db > 30

    def test_a_bypassed_site_makes_none(self, sim):
        sim, batches = sim
        sim.quantizers["1:out"].mode = qtk.Mode.BYPASS
        errors = {error.site: error for error in sim.compare(batches, progress=False)}
        assert errors["1:out"].own_sqnr_db == math.inf
        assert errors["1:out"].clipped == 0.0
        assert sim.quantizers["1:out"].mode is qtk.Mode.BYPASS


def test_tokens_that_do_not_count_are_left_out_of_own_errors():
    class Tokens(nn.Module):
        def forward(self, x, mask):
            return x.relu() * mask[..., None]

    torch.manual_seed(0)
    x, mask = torch.randn(3, 5, 4), torch.ones(3, 5, dtype=torch.long)
    mask[:, 3:] = 0
    x[:, 3:] = 1e4
    sim = qtk.QuantSim(Tokens(), (x, mask))
    sim.compute_encodings([(x, mask)], progress=False, valid="mask")
    counted = {error.site: error for error in sim.compare([(x, mask)], progress=False, valid="mask")}
    whole = {error.site: error for error in sim.compare([(x, mask)], progress=False)}
    assert counted["x:input"].clipped == 0.0
    assert counted["x:input"].own_sqnr_db > 35
    assert whole["x:input"].clipped == pytest.approx(0.4)
    assert whole["x:input"].own_sqnr_db < 1


class Reciprocals(nn.Module):
    """Infinite where the input is 0, and NaN where two infinite values are subtracted."""

    def forward(self, x):
        y = torch.reciprocal(x * 1.0)
        return (y - y.square()) * 2.0


def test_infinite_values_and_nan_come_first_in_order_of_execution():
    x = torch.rand(16, 4) + 1
    sim = qtk.QuantSim(Reciprocals().eval(), x)
    sim.compute_encodings([x], progress=False)
    sim.set_range("x:input", low=-1.0, high=0.0)
    with in_mode([quantizer for name, quantizer in sim.quantizers.items() if name != "x:input"], Mode.BYPASS):
        errors = sim.compare([x], progress=False)
    broken = [error for error in errors if error.not_finite]
    assert errors[:len(broken)] == broken
    assert [error.site for error in broken] == ["reciprocal:out", "square:out", "sub:out", "mul_1:out"]
    assert all(math.isnan(error.sqnr_db) and error.not_finite == x.numel() for error in broken)
    assert math.isfinite(errors[len(broken)].sqnr_db)


def test_a_bypassed_site_fills_no_range():
    sim = qtk.QuantSim(nn.Linear(4, 2).eval(), torch.randn(8, 4))
    sim.compute_encodings([torch.randn(8, 4)], progress=False)
    for quantizer in sim.quantizers.values():
        quantizer.mode = qtk.Mode.BYPASS
    assert all(math.isnan(error.range_filled) for error in sim.compare([torch.randn(8, 4)], progress=False))


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize("name", slow_but(PYTHON, "deep", "kinds", "tied_islands", "no_input"))
def test_compare_measures_every_leading_site(name):
    entry, sim = PYTHON[name], simulated(name)
    errors = sim.compare(SIZES, forward=lambda model, size: entry.run(model, size), progress=False)
    leading = {site.name for site, decided in sim.plan.items() if decided.leader is None}
    assert {error.site for error in errors} == leading
    figures = [error.own_sqnr_db for error in errors if not math.isnan(error.own_sqnr_db)]
    assert figures == sorted(figures)
    assert all(error.unpaired for error in errors if math.isnan(error.sqnr_db))
    assert {error.site for error in errors if error.sqnr_db > 30} >= weights(name)
