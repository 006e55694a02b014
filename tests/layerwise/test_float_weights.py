"""The float model of a simulation whose weights layer-wise methods have rewritten."""

import copy

import pytest
import torch
from torch import nn

import qtk
from qtk.layerwise.float_weights import FloatWeights
from qtk.quantizers.quantizer import Mode


@pytest.fixture
def rewritten():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8)).eval()
    data = [torch.randn(64, 16)]
    rules = [{"match": {"op": ["linear"]}, "weight": {"scheme": "min_max"}}]
    sim = qtk.QuantSim(model, data[0], weight_bits=2, config={"version": 1, "extends": "default", "rules": rules})
    sim.compute_encodings(data, progress=False)
    qtk.apply_layerwise(sim, data, "gptq(scales=False)", options=qtk.LayerwiseOptions(holdout=0), progress=False)
    return model, sim, data


def test_they_are_in_place_inside_and_the_rounded_ones_afterwards(rewritten):
    model, sim, _ = rewritten
    before = {name: value.clone() for name, value in sim.model.named_parameters()}
    with FloatWeights(sim.simulation).in_place():
        assert torch.equal(dict(sim.model.named_parameters())["0.weight"], model[0].weight)
    assert all(torch.equal(value, before[name]) for name, value in sim.model.named_parameters())
    assert not torch.equal(before["0.weight"], model[0].weight)


def test_compare_measures_against_the_float_model(rewritten):
    model, sim, data = rewritten
    errors = {row.site: row for row in sim.compare(data, progress=False)}
    weight = model[0].weight.detach()
    rounded = dict(sim.model.named_parameters())["0.weight"].detach()
    expected = 10 * torch.log10(weight.square().sum() / (rounded - weight).square().sum())
    assert errors["0.weight"].own_sqnr_db == pytest.approx(float(expected), abs=0.05)
    assert errors["0.weight"].sqnr_db == pytest.approx(float(expected), abs=0.05)
    with torch.no_grad():
        simulated, in_float = sim.model(data[0]), model(data[0])
    truth = float(10 * torch.log10(in_float.square().sum() / (simulated - in_float).square().sum()))
    assert errors["2:out"].sqnr_db == pytest.approx(truth, abs=0.05)


def test_a_simulation_without_them_says_so():
    data = [torch.randn(64, 16)]
    sim = qtk.QuantSim(nn.Sequential(nn.Linear(16, 16), nn.ReLU()).eval(), data[0], weight_bits=2)
    sim.compute_encodings(data, progress=False)
    qtk.apply_gptq(sim, data, options=qtk.LayerwiseOptions(holdout=0, keep_originals=False), progress=False)
    with pytest.warns(match=r"the float weights of 1 layers \(0.weight\) are not kept .* taken for the float model"):
        sim.compare(data, progress=False)


def relative_error(output, expected):
    return float((output - expected).square().sum() / expected.square().sum())


@pytest.mark.medium
def test_sensitivity_measures_each_rounded_weight_in_the_float_model(rewritten):
    model, sim, (x,) = rewritten
    parameters = dict(sim.model.named_parameters())
    with torch.no_grad():
        expected, simulated = model(x), sim.model(x)
        rows = {row.name: row for row in sim.sensitivity([x], top=1000, progress=False)}
        for name in ("0.weight", "2.weight"):
            rounded = sim.quantizers[name](parameters[name])
            alone, index = copy.deepcopy(model), int(name[0])
            alone[index].weight.copy_(rounded)
            loss = relative_error(alone(x), expected)
            assert rows[name].increase == pytest.approx(loss, rel=1e-4)
            assert rows[name].estimated_increase == pytest.approx(loss, rel=0.5)
            assert loss > 0.01
            without = copy.deepcopy(sim)
            dict(without.model.named_parameters())[name].copy_(model[index].weight)
            without.quantizers[name].mode = Mode.BYPASS
            recovered = relative_error(simulated, expected) - relative_error(without.model(x), expected)
            assert rows[name].recovery == pytest.approx(recovered, rel=1e-3)
    assert torch.equal(sim.model(x), simulated)


@pytest.mark.medium
def test_assign_bits_measures_against_the_float_model(rewritten):
    model, sim, (x,) = rewritten
    found = qtk.assign_bits(sim, [x], budget={"bit_operations": 1e9}, choices=(8, 16), progress=False)
    with torch.no_grad():
        loss = relative_error(sim.model(x), model(x))
    assert found.measured[0].loss == pytest.approx(loss, rel=1e-3)
    assert loss > 0.01


@pytest.mark.medium
def test_a_report_of_a_loaded_simulation_says_which_reference_it_has(rewritten, tmp_path):
    model, sim, data = rewritten
    sim.save(tmp_path / "saved")
    with pytest.warns(match="are not kept"):
        qtk.QuantSim.load(tmp_path / "saved", model, data[0]).report(tmp_path / "report.html", data, progress=False)
    assert "rounded weights are taken for the float model" in (tmp_path / "report.html").read_text()
