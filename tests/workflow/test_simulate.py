"""The simulation of a handle is made of its settings alone."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import qtk
from qtk.config.load import load_config
from qtk.errors import ConfigError, EncodingError
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


def test_explicit_shapes_are_left_out():
    sim = qtk.QuantSim(nn.Linear(3, 2).eval(), X, dynamic_shapes={"input": {0: "rows"}})
    assert settings_to_json(sim, sim.model)["dynamic_shapes"] == "batch"


def test_older_files_have_fewer():
    assert settings_from_json({"scheme": "min_max"}) == {
        "scheme": "min_max", "config": load_config("default"), "dynamic_shapes": "batch"}


def test_a_width_that_is_none_is_refused():
    with pytest.raises(EncodingError, match="not a width: 'wide'"):
        settings_from_json({"weight_bits": "wide"})
