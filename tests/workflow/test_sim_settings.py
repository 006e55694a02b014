"""Settings come back from JSON as the arguments that make the same simulation."""

import json

import pytest
import torch
from torch import nn

import qtk
from qtk.config.load import load_config
from qtk.errors import EncodingError
from qtk.workflow.sim_settings import settings_from_json, settings_to_json

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
