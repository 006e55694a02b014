"""What evaluate may return, and which mistakes are named."""

import pytest
import torch
from torch import nn

from qtk.auto.metric import Metric
from qtk.errors import CalibrationError

MODEL = nn.Identity()


def metric(value, labels=None):
    return Metric.of(value if callable(value) else lambda model: value, MODEL, 0.01, 0.95, labels)


def test_a_number_has_no_promise_and_scores_have_one():
    assert metric(0.5).promise is None
    assert metric(torch.tensor([0.5])).drop(MODEL, "step") == (0.0, None)
    found = metric(torch.tensor([True, False, True, True]))
    assert found.in_float == 0.75
    drop, scores = found.drop(MODEL, "step")
    assert (drop, scores) == (0.0, [1.0, 0.0, 1.0, 1.0])


def test_the_search_sees_a_quarter_of_the_samples():
    results = iter([torch.ones(300), torch.ones(300), torch.arange(300) % 2])
    drop, scores = metric(lambda model: next(results)).drop(MODEL, "step")
    assert 0.4 < drop < 0.6
    assert drop * 75 == pytest.approx(round(drop * 75))
    assert len(scores) == 300


@pytest.mark.parametrize(("value", "labels", "match"), [
    (lambda model: torch.rand(300), None, "other scores when called again"),
    (torch.tensor([0.5, 1.5]), None, "must be from 0 to 1, and evaluate gives 0.5 to 1.5 for the float model"),
    (torch.tensor([0.5, float("nan")]), None, "must be from 0 to 1"),
    (torch.ones(2, 2), None, r"a number, or a tensor \[samples\] of scores, got Tensor"),
    (0.5, torch.ones(3), r"class of each sample that evaluate scores, got shape \[3\] where evaluate gives a number"),
    (torch.ones(4), torch.ones(3), "gives 4 scores"),
])
def test_mistakes_are_named(value, labels, match):
    with pytest.raises(CalibrationError, match=match):
        metric(value, labels)
