"""Ranges of values that clamps alone read, against the float model."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qtk
from qtk.calibration.clamped_values import clamped_values
from qtk.numerics.error import sqnr_db


class Clamped(nn.Module):
    """The exponential of what a layer computes, read by ``read``."""

    def __init__(self, read):
        super().__init__()
        torch.manual_seed(0)
        self.read, self.layer = read, nn.Linear(8, 8)

    def forward(self, x):
        return self.read((self.layer(x) * 4).exp())


X = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("read", "bounds"), [
    (lambda y: y.clamp(0, 1), (0, 1)), (lambda y: y.clamp(max=1.5), (None, 1.5)),
    (lambda y: y[:, 2:].clamp(0, 1), (0, 1)), (F.hardtanh, (-1, 1)), (F.relu6, (0, 6)), (F.relu, (0, None)),
    (lambda y: y.clamp(0.5, 1) + y.clamp(0.1, 0.7), (0.1, 1)), (lambda y: y.clamp(0.5, 1) + y.clamp(max=2), (None, 2)),
    (lambda y: y.clamp(0, 1) + y, None), (lambda y: (y.clamp(0, 1), y), None), (lambda y: y.clamp(y - 1, y), None),
])
def test_nothing_is_spent_on_what_clamps_cut_off(read, bounds, recwarn):
    sim = qtk.QuantSim(Clamped(read).eval(), X)
    known = {site.name: each for site, each in clamped_values(sim.simulation).items()}
    assert known.get("exp:out") == bounds
    sim.compute_encodings([X], progress=False)
    assert not [each for each in recwarn if "not held" in str(each.message)]
    if bounds is not None and bounds[1] is not None:
        assert float(sim.quantizers["exp:out"].encoding.maximum) <= bounds[1] * 1.01


@pytest.mark.parametrize("config", ["default", "onnxruntime"])
def test_the_digits_are_left_to_what_remains(config):
    model = Clamped(lambda y: y.clamp(0, 1)).eval()
    sim = qtk.QuantSim(model, X, config=config)
    sim.compute_encodings([X], progress=False)
    assert sqnr_db(model(X).detach(), sim.model(X).detach()) > 30
