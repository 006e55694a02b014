"""Sentinels are a mask only where a mask can be, and a site that carried one gets another chance."""

import pytest
import torch
from torch import nn

import qtk
from qtk.errors import CalibrationError


class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.out = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x, mask):
        return self.out((self.fc(x) + mask).softmax(-1))


def masked(share):
    mask = torch.zeros(8, 4)
    mask[:, : int(4 * share)] = -torch.inf
    return mask


def test_the_plan_is_made_anew_at_each_calibration():
    x = torch.randn(8, 4)
    sim = qtk.QuantSim(Scores(), (x, masked(0)))
    whole = str(sim.plan)
    sim.compute_encodings([(x, masked(0.5))], progress=False)
    assert "mask:input" not in sim.quantizers
    sim.compute_encodings([(x, masked(0))], progress=False)
    assert str(sim.plan) == whole
    assert "mask:input" in sim.encodings()
    sim.check()


def test_a_calibration_that_fails_changes_nothing():
    x = torch.randn(8, 4)
    sim = qtk.QuantSim(Scores(), (x, masked(0)))
    sim.compute_encodings([(x, masked(0.5))], progress=False)
    plan, expected, encodings = str(sim.plan), sim.model(x, masked(0.5)), sim.encodings()
    with pytest.raises(CalibrationError, match="NaN"):
        sim.compute_encodings([(x * torch.nan, masked(0))], progress=False)
    assert str(sim.plan) == plan
    assert torch.equal(sim.model(x, masked(0.5)), expected)
    assert all(encoding.equals(encodings[name]) for name, encoding in sim.encodings().items())


def test_a_calibration_that_is_interrupted_changes_nothing():
    x = torch.randn(8, 4)
    sim = qtk.QuantSim(Scores(), (x, masked(0)))
    sim.compute_encodings([(x, masked(0.5))], progress=False)
    plan = str(sim.plan)

    def interrupted(model, batch):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sim.compute_encodings([(x, masked(0))], forward=interrupted, progress=False)
    assert str(sim.plan) == plan


@pytest.mark.parametrize("value", [-torch.inf, -2e30])
def test_one_number_gone_wrong_is_named_and_changes_nothing(value):
    model = nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    good, bad = torch.randn(8, 64), torch.randn(8, 64)
    bad[5, 7] = value
    sim = qtk.QuantSim(model, good)
    plan = str(sim.plan)
    with pytest.raises(CalibrationError, match=r"batch 1: input:input: .* at index \[5, 7\], one of 1 values .*no att"):
        sim.compute_encodings([good, bad], progress=False)
    assert str(sim.plan) == plan
    assert not sim.encodings()


@pytest.mark.parametrize("share", [1, 40])
def test_a_weight_that_is_infinite_is_refused(share):
    model = nn.Linear(64, 8)
    with torch.no_grad():
        model.weight.view(-1)[:share] = -torch.inf
    sim = qtk.QuantSim(model, torch.randn(2, 64), activation_bits=None)
    with pytest.raises(CalibrationError, match=r"^weight: "):
        sim.compute_encodings(None, progress=False)


def test_a_constant_mask_is_left_alone():
    class Causal(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.out = nn.Linear(4, 4), nn.Linear(4, 2)
            self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))

        def forward(self, x):
            return self.out((self.fc(x) + self.mask).softmax(-1))

    model, x = Causal().eval(), torch.randn(2, 4, 4)
    sim = qtk.QuantSim(model, x)
    sim.compute_encodings([x], progress=False)
    sim.check()
    assert "mask" not in sim.quantizers
    assert float((sim.model(x) - model(x)).abs().max()) < 0.1
