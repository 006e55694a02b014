"""What no setting may exceed."""

import pytest
import torch
from torch import nn

import qtk
from qtk.auto.budget import Budget
from qtk.errors import CalibrationError, ConfigError
from tests.auto.test_quantize import BATCHES, model


@pytest.mark.slow
def test_a_setting_above_the_bytes_is_not_kept():
    net, limit = model(), {"bytes": 1400}  # plain calibration with 4 bits has 1,312
    _, account = qtk.quantize(net, BATCHES, target="default", weight_bits=4, max_drop=-1.0, progress=False,
                              budget=limit)
    refused = [trial for trial in account.trials if "bytes of parameters, of at most 1,400" in (trial.reason or "")]
    assert refused
    assert all(trial.size_bytes > 1400 and "precise" in trial.step for trial in refused)
    assert all(trial.size_bytes <= 1400 for trial in account.trials if trial.kept)
    with pytest.raises(CalibrationError, match=r"plain calibration: .* bytes of parameters, of at most 100"):
        qtk.quantize(net, BATCHES, target="default", time_limit=0.0, progress=False, budget={"bytes": 100})


def test_latency_is_measured_where_the_budget_has_it(monkeypatch):
    class Latency:
        first_ms = 2.0

        def __init__(self, net, inputs):
            assert inputs is example

        def ratio(self, sim, *, progress):
            return 1.5

    monkeypatch.setattr("qtk.auto.budget.WholeLatency", Latency)
    example = torch.zeros(2, 3)
    assert Budget({"bytes": 1}, nn.Identity(), example).milliseconds(lambda: None) is None
    budget = Budget({"milliseconds": 2.5}, nn.Identity(), example)
    assert budget.milliseconds(lambda: None) == 3.0
    assert budget.exceeded(None, 3.0) == "3 ms, of at most 2.5"
    assert budget.exceeded(10**9, 2.5) is None


@pytest.mark.medium
def test_mistakes_are_named():
    with pytest.raises(ConfigError, match="budget: bytes must be a positive number, got -1"):
        qtk.quantize(model(), BATCHES, budget={"bytes": -1}, progress=False)
