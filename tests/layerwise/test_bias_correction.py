"""Bias correction, against means and errors of outputs formed in float64."""

from dataclasses import replace

import pytest
import torch

import qtk
from qtk.layerwise.bias_correction import BiasCorrection
from qtk.moments.required_statistics import RequiredStatistics
from tests.layerwise.convolutional_net import lost, problem
from tests.layerwise.layers import CHANNEL, LAYERS, named


@pytest.mark.medium
def test_the_report_of_bias_correction_is_true():
    model, sim, data = problem(weight_bits=2, activation_bits=None)
    before = problem(weight_bits=2, activation_bits=None)[1]
    report = qtk.correct_bias(sim, data, sites="fc2.weight", progress=False)
    last = report.layers[-1]
    assert last.noise == pytest.approx(lost(model, sim, data), rel=1e-4)
    assert last.noise + last.before - last.after == pytest.approx(lost(model, before, data), rel=1e-3)
    assert last.sqnr_db > last.sqnr_before_db


def outputs(case, x, weight, bias):
    """Shape: [outputs, rest], float64."""
    return case.run(x, weight) + bias.double()[:, None]


def error(case, state):
    """Squared error of the layer's output in a state."""
    target = outputs(case, case.original, state.float_weight, state.float_bias)
    return float((outputs(case, case.quantized, state.simulated_weight(), state.bias) - target).square().sum())


@pytest.mark.parametrize("noise", [0.0, 0.5])
@pytest.mark.parametrize("name", LAYERS)
def test_every_output_gets_its_mean_in_float(name, noise):
    case = named(name, CHANNEL, noise=noise)
    state = BiasCorrection().apply(case.problem)
    target = outputs(case, case.original, state.float_weight, state.float_bias).mean(1)
    before = outputs(case, case.quantized, state.simulated_weight(), state.float_bias).mean(1)
    torch.testing.assert_close(state.bias.double() - state.float_bias.double(), target - before, rtol=1e-4, atol=1e-6)
    assert (target - before).abs().max() > 1e-3
    assert state.weight is case.problem.weight
    assert state.encoding is case.problem.encoding
    assert state.loss[0] - state.loss[1] == pytest.approx(error(case, case.problem) - error(case, state), rel=1e-4)


@pytest.mark.parametrize("offset", [0.0, 1.0, -3.5])
def test_a_bias_that_was_corrected_before_is_corrected_from_the_float_bias(offset):
    case = named("conv", CHANNEL, noise=0.5)
    once = BiasCorrection().apply(case.problem)
    start = replace(case.problem, bias=case.problem.bias + offset)
    again = BiasCorrection().apply(start)
    torch.testing.assert_close(again.bias, once.bias, rtol=0, atol=0)
    assert again.loss[0] - again.loss[1] == pytest.approx(error(case, start) - error(case, again), rel=1e-4)
    assert again.loss[1] == pytest.approx(once.loss[1], rel=1e-6)


def test_it_adds_its_gain_to_the_loss_of_the_methods_before():
    case = named("linear", CHANNEL, noise=0.5)
    alone = BiasCorrection().apply(case.problem)
    after = BiasCorrection().apply(replace(case.problem, loss=(100.0, 70.0)))
    assert after.loss[0] == 100.0
    assert 70.0 - after.loss[1] == pytest.approx(error(case, case.problem) - error(case, alone), rel=1e-4)


def test_a_layer_without_a_bias_stays_as_it_is():
    state = replace(named("linear", CHANNEL).problem, bias=None, float_bias=None)
    assert BiasCorrection().apply(state) is state


def test_it_needs_means_alone_of_any_amount_of_data():
    method = BiasCorrection()
    assert method.required_statistics(4) == RequiredStatistics(4, gram=False)
    assert method.min_rows(1023) == 0
    assert method.refuses(named("linear", CHANNEL).problem.encoding.spec) is None
