"""The simulation of a trial, against one made by hand; its ranking, against switching every site off."""

import math

import pytest
import torch
from torch import nn

import qtk
from qtk.auto.choices import Choices
from qtk.auto.run_time import RunTime
from qtk.auto.trial_builder import TrialBuilder
from qtk.config.load import load_config
from tests.auto.three_layers import BATCHES, mlp, widths


def builder(target="default", weight_bits=4, activation_bits=8, **options):
    model = qtk.prepare_model(mlp(), BATCHES[0])
    return TrialBuilder(model, BATCHES[0], load_config(target), weight_bits, activation_bits, BATCHES, **options)


def outputs(model):
    with torch.no_grad():
        return torch.cat([model(batch) for batch in BATCHES]).double()


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize(("choices", "steps"), [
    (Choices("mse"), lambda sim: None),
    (Choices("min_max", ("equalize",)), qtk.equalize_model),
    (Choices("min_max", layerwise=("gptq",)), lambda sim: qtk.apply_gptq(sim, BATCHES, progress=False)),
], ids=["calibrated", "transformed", "improved"])
def test_it_is_the_simulation_made_by_hand(choices, steps):
    expected = qtk.QuantSim(mlp(), BATCHES[0], scheme=choices.scheme, weight_bits=4, activation_bits=8)
    if not choices.layerwise:
        steps(expected)
    expected.compute_encodings(BATCHES, progress=False)
    if choices.layerwise:
        steps(expected)
    made = builder().simulation(choices)
    assert widths(made) == widths(expected)
    assert torch.equal(outputs(made.model), outputs(expected.model))


@pytest.mark.medium
def test_the_prepared_model_stays_as_it_is():
    trials = builder()
    before = {name: value.clone() for name, value in trials.model.state_dict().items()}
    trials.simulation(Choices("mse", ("equalize", "smooth_quant"), ("gptq", "bias_correction"), ("2.weight",)))
    after = trials.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(outputs(trials.model), outputs(mlp()))


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize(("target", "precise"), [("default", 16), ("onnxruntime", None)])
def test_precise_sites_have_the_width_of_the_target_and_others_keep_theirs(target, precise):
    trials = builder(target)
    sites = ("2.weight", "1:out")
    plain, mixed = (
        {name: bits for name, bits in widths(trials.simulation(each)).items() if not name.endswith("bias")}
        for each in (Choices("min_max"), Choices("min_max", precise=sites))
    )  # the scale of a bias follows from its weight
    assert set(sites) <= plain.keys()
    expected = {name: precise if name in sites else bits for name, bits in plain.items()}
    assert mixed == {name: bits for name, bits in expected.items() if bits is not None}


@pytest.mark.medium
def test_the_ranking_is_by_the_error_that_each_site_adds():
    trials, choices = builder(weight_bits=3, activation_bits=4), Choices("min_max")
    sim, target = trials.simulation(choices), outputs(mlp())

    def error():
        return float((outputs(sim.model) - target).square().sum() / target.square().sum())

    whole, gains = error(), {}
    for name, quantizer in sim.quantizers.items():
        quantizer.mode = qtk.Mode.BYPASS
        gains[name] = whole - error()
        quantizer.mode = qtk.Mode.SIMULATE
    expected = sorted((name for name in gains if gains[name] > 0), key=lambda name: -gains[name])
    assert len(expected) > 2
    assert trials.ranking(choices).recovered == tuple(expected)


class Pole(nn.Module):
    def forward(self, x):
        return (x * 2.0 - 7.0).reciprocal()


@pytest.mark.medium
def test_a_simulation_that_is_not_finite_is_ranked_by_estimates():
    data = [torch.linspace(0, 7.5, 64).reshape(8, 8) for _ in range(2)]  # in 4 bits, one code of x * 2 is 7
    config = load_config({"version": 1, "rules": [{"match": {"op": "reciprocal"}, "output": "float"}]})
    trials = TrialBuilder(qtk.prepare_model(Pole(), data[0]), data[0], config, 8, 4, data)
    assert not trials.simulation(Choices("min_max")).model(data[0]).isfinite().all()
    assert set(trials.ranking(Choices("min_max")).recovered) == {"x:input", "mul:out"}


@pytest.mark.medium
def test_layerwise_methods_that_precise_sites_leave_no_layer_are_left_out():
    trials, weights = builder("onnxruntime"), ("0.weight", "2.weight", "4.weight")
    made, expected = (trials.simulation(Choices("min_max", layerwise=methods, precise=weights))
                      for methods in (("bias_correction",), ()))
    assert torch.equal(outputs(made.model), outputs(expected.model))


@pytest.mark.medium
def test_batches_go_through_forward():
    pairs = [(0, batch) for batch in BATCHES]
    trials = TrialBuilder(qtk.prepare_model(mlp(), BATCHES[0]), BATCHES[0], load_config("default"), 4, 8, pairs,
                          lambda model, pair: model(pair[1]))
    choices = Choices("mse", ("smooth_quant",), ("bias_correction",))
    assert torch.equal(outputs(trials.simulation(choices).model), outputs(builder().simulation(choices).model))
    assert trials.ranking(Choices("mse")) == builder().ranking(Choices("mse"))


@pytest.mark.medium
def test_prices_are_the_times_of_run_time_and_those_that_cannot_be_built_are_infinite():
    trials = builder("onnxruntime", weight_bits=8, dynamic=load_config("dynamic"))
    plain, dynamic = Choices("min_max"), Choices("min_max", dynamic=True)
    sim = trials.simulation(dynamic)
    assert sim.config == load_config("dynamic")
    ratio = RunTime(load_config("onnxruntime").runtime.kernels).ratio(sim.simulation, lambda: sim.model(BATCHES[0]))
    assert trials.price(dynamic) == pytest.approx(ratio)
    fresh = builder("onnxruntime", weight_bits=8, dynamic=load_config("dynamic"))
    assert fresh.price(dynamic, sim) == trials.price(dynamic)
    assert trials.price(Choices("mse", ("equalize",), ("gptq",))) == trials.price(plain)
    assert trials.price(Choices("min_max", precise=tuple(trials.simulation(plain).quantizers))) == math.inf
