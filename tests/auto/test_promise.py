"""A promised drop: how often it is broken, how often a good setting is refused, and what is said of few samples."""

import math

import pytest
import torch

from qtk.auto.promise import Promise
from qtk.errors import CalibrationError


def scores(lost, gained, count, generator):
    """Scores in float and quantized, each sample drawn by itself."""
    draws = torch.rand(count, generator=generator)
    in_float = (draws >= gained).double()
    return in_float, torch.where(draws < gained, 1.0, torch.where(draws > 1 - lost, 0.0, in_float))


def accepted(lost, gained, count, max_drop, trials=40, looks=1):
    """The share of trials in which one of ``looks`` settings of the same kind is shown to be within the drop."""
    generator, passed = torch.Generator().manual_seed(0), 0
    for _ in range(trials):
        in_float, _ = scores(0.0, gained, count, generator)
        promise = Promise(in_float, max_drop, 0.95)
        for _ in range(looks):
            draws = torch.rand(count, generator=generator)
            quantized = torch.where(in_float == 0, 1.0, torch.where(draws < lost, 0.0, in_float))
            if promise.bound(quantized) <= max_drop:
                passed += 1
                break
    return passed / trials


@pytest.mark.medium
@pytest.mark.parametrize(("lost", "gained"), [(0.05, 0.03), pytest.param(0.02, 0.0, marks=pytest.mark.slow)])
def test_a_setting_at_the_limit_is_accepted_in_at_most_one_of_twenty(lost, gained):
    assert accepted(lost, gained, 900, 0.02, looks=2) <= 0.05


def test_a_setting_far_within_the_limit_is_accepted():
    assert accepted(0.002, 0.001, 1500, 0.02, trials=20) >= 0.95


def test_scores_between_the_ends_give_a_tighter_bound_than_their_range():
    generator = torch.Generator().manual_seed(1)
    in_float = torch.rand(3000, generator=generator) * 0.5 + 0.25
    quantized = (in_float - 0.005 + 0.02 * torch.randn(3000, generator=generator)).clamp(0, 1)
    bound = Promise(in_float, 0.02, 0.95).bound(quantized)
    hoeffding = 0.005 + 2 * math.sqrt(math.log(20) / 2 / 2000)
    assert 0.005 < bound < 0.01 < hoeffding


def test_each_further_setting_gets_a_wider_bound():
    promise = Promise(torch.ones(900), 0.01, 0.95)
    bounds = [promise.bound(torch.ones(900)) for _ in range(4)]
    assert bounds == sorted(bounds)
    assert bounds[0] < bounds[3]


def test_few_samples_say_how_many_are_needed():
    few, enough = Promise(torch.ones(200), 0.01, 0.95), Promise(torch.ones(1000), 0.01, 0.95)
    assert not few.is_possible
    assert enough.is_possible
    needed = few.samples_needed(None)
    assert needed is not None
    assert Promise(torch.ones(int(0.9 * needed)), 0.01, 0.95).is_possible is False
    assert Promise(torch.ones(int(1.2 * needed)), 0.01, 0.95).is_possible
    losing = torch.ones(200)
    losing[::20] = 0
    assert few.samples_needed(losing) is None
    assert Promise(torch.ones(200), 0.0, 0.95).samples_needed(None) is None


@pytest.mark.medium
def test_the_number_needed_holds_the_drop_of_such_a_setting():
    generator = torch.Generator().manual_seed(2)
    in_float, quantized = scores(0.006, 0.002, 600, generator)
    needed = Promise(in_float, 0.02, 0.95).samples_needed(quantized)
    lost = float((in_float > quantized).double().mean())
    gained = float((in_float < quantized).double().mean())
    assert accepted(lost, gained, needed, 0.02, trials=30) > 0.5
    assert accepted(lost, gained, needed // 3, 0.02, trials=30) < 0.5


def test_drops_by_class_come_worst_first():
    labels = torch.tensor([0, 0, 1, 1])
    found = Promise(torch.ones(4), 0.1, 0.95).drops_by_class(torch.tensor([1.0, 1.0, 0.0, 1.0]), labels)
    assert found == [(1, 0.5, 2), (0, 0.0, 2)]


def test_scores_of_other_samples_are_refused():
    with pytest.raises(CalibrationError, match="gives 3 scores, and 4 for the float model"):
        Promise(torch.ones(4), 0.1, 0.95).bound(torch.ones(3))
    with pytest.raises(CalibrationError, match=r"confidence must be above 0 and below 1, got 1\.0"):
        Promise(torch.ones(4), 0.1, 1.0)
