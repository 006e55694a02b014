"""The simulation of a handle is made of its settings alone."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import qtk
from qtk.config.load import load_config
from qtk.errors import CaptureError, ConfigError, EncodingError
from qtk.quantizers.quantizer import Mode
from qtk.workflow.simulate import plan_by, settings_from_json, settings_to_json, simulate


def settings(**given):
    return SimpleNamespace(**{
        "scheme": "min_max", "weight_bits": 4, "activation_bits": 8, "config": load_config("default"),
        "example_inputs": torch.randn(2, 3), "dynamic_shapes": "batch", **given})


def made(sim, model):
    return simulate(sim, model, in_place=False, variants=(), states={})


def test_it_has_the_widths_and_the_target_of_the_settings_and_simulates():
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU()).eval()
    simulation = made(settings(), model)
    assert {site.name: decided.spec.dtype.bits for site, decided in simulation.plan.items()} == {
        "input:input": 8, "0.weight": 4, "1:out": 8}
    assert {quantizer.mode for quantizer in simulation.quantizers.values()} == {Mode.SIMULATE}
    assert simulation.model.get_parameter("0.weight") is not model[0].weight
    assert simulate(settings(), model, in_place=True, variants=(), states={}).model.get_parameter("0.weight") is (
        model[0].weight)


def test_a_plan_by_another_config_leaves_the_simulation():
    sim = settings()
    simulation = made(sim, nn.Sequential(nn.Linear(3, 2)).eval())
    float_weights = load_config({"version": 1, "rules": [{"match": {"path": "0"}, "weight": "float"}]})
    other = plan_by(sim, simulation.model, float_weights)
    assert "0.weight" not in {site.name for site in other}
    assert "0.weight" in {site.name for site in simulation.plan}


def test_a_rule_about_no_operator_is_refused_before_anything_is_captured():
    config = load_config({"version": 1, "rules": [{"match": {"op": "convolve"}, "weight": {"bits": 4}}]})
    with pytest.raises(ConfigError, match="convolve"):
        made(settings(config=config), None)


X = torch.randn(2, 3)


@pytest.mark.parametrize("given", [
    {}, {"weight_bits": 4, "activation_bits": None, "scheme": "percentile(quantile=0.99)"},
    {"config": "onnxruntime", "dynamic_shapes": "all"},
])
def test_they_make_the_same_simulation(given):
    model = nn.Sequential(nn.Linear(3, 2)).eval()
    sim = qtk.QuantSim(model, X, **given)
    stored = json.loads(json.dumps(settings_to_json(sim, sim.model)))
    again = qtk.QuantSim(model, X, **settings_from_json(stored))
    assert (again.scheme, again.weight_bits, again.activation_bits) == (sim.scheme, sim.weight_bits,
                                                                       sim.activation_bits)
    assert (again.config, again.dynamic_shapes, str(again.plan)) == (sim.config, sim.dynamic_shapes, str(sim.plan))


NAMED = {"input": {0: "rows", 1: "frames"}}


@pytest.mark.sample(2)
@pytest.mark.parametrize("is_prepared", [True, False])
@pytest.mark.parametrize(("shapes", "expected"), [("all", "all"), (None, None), (NAMED, NAMED)])
def test_a_loaded_simulation_takes_the_sizes_that_the_saved_one_took(is_prepared, shapes, expected, tmp_path):
    x, longer, model = torch.randn(2, 5, 3), torch.randn(4, 7, 3), nn.Linear(3, 2).eval()
    if is_prepared:
        sim = qtk.QuantSim(qtk.prepare_model(model, x, dynamic_shapes=shapes), x)
    else:
        sim = qtk.QuantSim(model, x, dynamic_shapes=shapes)
    sim.compute_encodings([x], progress=False)
    sim.save(tmp_path / "sim")
    loaded = qtk.QuantSim.load(tmp_path / "sim", model, x)
    assert loaded.dynamic_shapes == expected
    if shapes is None:
        with pytest.raises(CaptureError, match="captured for"):
            loaded.model(longer)
    else:
        assert torch.equal(loaded.model(longer), sim.model(longer))
    loaded.save(tmp_path / "again")
    assert qtk.QuantSim.load(tmp_path / "again", model, x).dynamic_shapes == expected


class Branch(nn.Module):
    """Stays Python, with an island for each layer."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        hidden = self.first(x)
        return self.last(hidden / 2 if float(hidden.abs().max()) > 9 else hidden)


@pytest.mark.sample(3)
@pytest.mark.parametrize("is_prepared", [True, False])
@pytest.mark.parametrize("shapes", ["batch", "all", None])
def test_a_loaded_simulation_of_islands_takes_the_sizes_that_the_saved_one_took(is_prepared, shapes, tmp_path):
    x, longer, model = torch.randn(2, 5, 3), torch.randn(4, 7, 3), Branch().eval()
    if is_prepared:
        sim = qtk.QuantSim(qtk.prepare_model(model, x, dynamic_shapes=shapes), x)
    else:
        sim = qtk.QuantSim(model, x, dynamic_shapes=shapes)
    sim.compute_encodings([x], progress=False)
    for folder in ("first", "second"):
        sim.save(tmp_path / folder)
        loaded = qtk.QuantSim.load(tmp_path / folder, model, x)
        assert loaded.dynamic_shapes == shapes
        if shapes is None:
            for each in (sim, loaded):
                with pytest.raises(CaptureError, match="captured for"):
                    each.model(longer)
        else:
            assert torch.equal(loaded.model(longer), sim.model(longer))
        sim = loaded


def test_shapes_inside_of_containers_are_left_out():
    class Pair(nn.Module):
        def forward(self, pair):
            return pair[0] + pair[1]

    pair = (X, X)
    sim = qtk.QuantSim(Pair().eval(), (pair,), dynamic_shapes={"pair": ({0: "rows"}, {0: "rows"})})
    assert settings_to_json(sim, sim.model)["dynamic_shapes"] == "batch"


def test_older_files_have_fewer():
    assert settings_from_json({"scheme": "min_max"}) == {
        "scheme": "min_max", "config": load_config("default"), "dynamic_shapes": "batch"}


def test_a_width_that_is_none_is_refused():
    with pytest.raises(EncodingError, match="not a width: 'wide'"):
        settings_from_json({"weight_bits": "wide"})
