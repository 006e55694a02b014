"""The simulation of a handle is made of its settings alone."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from qtk.config.load import load_config
from qtk.errors import ConfigError
from qtk.quantizers.quantizer import Mode
from qtk.workflow.simulate import plan_by, simulate


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
