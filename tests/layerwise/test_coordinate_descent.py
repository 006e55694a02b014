"""Against forming every output of both paths, in float64."""

import itertools
from dataclasses import replace

import pytest
import torch

from qtk.algorithms.coordinate_descent import Descent
from qtk.errors import CalibrationError
from qtk.layerwise.coordinate_descent import CoordinateDescent, _Scales
from qtk.layerwise.gptq import Gptq
from qtk.layerwise.seq_mse import SeqMse
from tests.layerwise.layers import CHANNEL, LAYERS, TENSOR, blocks_of, named

SETTINGS = {"tensor": TENSOR, "channel": CHANNEL, "block": blocks_of(2), "asymmetric": CHANNEL | {"symmetric": False},
            "float": CHANNEL | {"dtype": "fp8_e4m3"}}


@pytest.mark.sample(5)
@pytest.mark.medium
@pytest.mark.parametrize("setting", ["tensor", "channel", "block", "asymmetric", "float"])
@pytest.mark.parametrize("name", LAYERS)
def test_it_starts_from_gptq_and_ends_lower_on_the_grid(name, setting):
    given = named(name, SETTINGS[setting], noise=0.5)
    start, found = Gptq().apply(given.problem), CoordinateDescent().apply(given.problem)
    losses = [given.lost(state.simulated_weight()) for state in (given.problem, start, found)]
    assert losses[2] < losses[1] < losses[0]
    assert torch.equal(found.simulated_weight(), found.weight)
    assert given.problem.current_error() - found.current_error() == pytest.approx(losses[0] - losses[2], rel=1e-5)


@pytest.mark.parametrize("scales", [False, True])
def test_no_pass_raises_the_error(scales):
    given = named("conv", CHANNEL, noise=0.5)
    losses = [given.lost(CoordinateDescent(passes, scales).apply(given.problem).weight) for passes in (1, 2, 4, 8)]
    assert all(after <= before * (1 + 1e-9) for before, after in itertools.pairwise(losses))
    assert losses[-1] < losses[0]


def test_it_goes_on_from_what_an_earlier_method_rounded():
    given = named("linear", CHANNEL)
    searched = SeqMse().apply(given.problem)
    chain = CoordinateDescent(scales=False).apply(searched)
    assert chain.encoding is searched.encoding
    assert given.lost(chain.weight) < given.lost(Gptq().apply(searched).weight)
    nearest = replace(given.problem, weight=given.problem.simulated_weight())
    few = CoordinateDescent(passes=1, scales=False).apply(nearest)
    assert not torch.equal(few.weight, CoordinateDescent(passes=1, scales=False).apply(given.problem).weight)
    assert given.lost(few.weight) < given.lost(nearest.weight)


def test_scales_are_searched_unless_they_are_to_stay():
    given = named("linear", CHANNEL)
    free, kept = (CoordinateDescent(scales=scales).apply(given.problem) for scales in (True, False))
    assert (CoordinateDescent().searches_scale, CoordinateDescent(scales=False).searches_scale) == (True, False)
    assert kept.encoding is given.problem.encoding
    assert not torch.equal(free.encoding.scale, kept.encoding.scale)
    assert given.lost(free.weight) < given.lost(kept.weight)


@pytest.mark.parametrize(("gains", "expected"), [
    (True, ["moved", "run_pass", "run_pass"] * 2),
    (False, ["moved", "run_pass"] * 4),  # it ends only where scales do not move either
])
def test_scales_move_before_every_second_pass_and_after_one_without_gain(gains, expected, monkeypatch):
    given, steps = named("linear", CHANNEL, noise=0.5), []
    monkeypatch.setattr(_Scales, "moved", lambda own, state, descent: steps.append("moved") or replace(
        state.encoding, scale=state.encoding.scale * 1.01))
    monkeypatch.setattr(Descent, "run_pass", lambda own, grid: steps.append("run_pass") or torch.tensor([[gains]]))
    CoordinateDescent(passes=4).apply(given.problem)
    assert steps == expected


def test_scales_stored_in_few_bits_stay():
    given = named("linear", {"dtype": "nvfp4"}, noise=0.5)
    found = CoordinateDescent().apply(given.problem)
    assert found.encoding.equals(given.problem.encoding)
    assert given.lost(found.weight) < given.lost(Gptq().apply(given.problem).weight)


def test_bad_settings_are_refused():
    with pytest.raises(CalibrationError, match="passes of coordinate_descent"):
        CoordinateDescent(passes=0)
