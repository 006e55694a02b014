import pytest
import torch
from torch import nn

import qtk
from qtk.errors import CalibrationError
from tests.zoo import streams


class Stream(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(4, 8), nn.Linear(8, 3)

    def forward(self, x, h):
        h = self.cell(x, h)
        return self.head(h), h


ZERO = torch.zeros(5, 8)


def stream(**options):
    torch.manual_seed(0)
    batches = [(x, ZERO) for x in torch.randn(24, 5, 4)]
    sim = qtk.QuantSim(Stream().eval(), batches[0], **options)
    return sim, batches


@pytest.mark.medium
def test_each_step_is_compared_with_float_that_carries_its_own_states():
    sim, batches = stream(states={"h": 1})
    sim.compute_encodings(batches, progress=False)
    found = sim.drift(batches, steps=30, progress=False).sqnr_db
    torch.manual_seed(0)
    torch.randn(24, 5, 4)
    model, h, simulated = Stream().eval(), ZERO, ZERO
    with torch.no_grad():
        for step in range(30):
            (y, h), (z, simulated) = model(batches[step % 24][0], h), sim.model(batches[step % 24][0], simulated)
            expected = 10 * torch.log10(y.double().square().sum() / (y.double() - z.double()).square().sum())
            assert found[step] == pytest.approx(float(expected), abs=0.05)


@pytest.mark.medium
def test_buffers_are_states_too_and_are_as_before():
    batches = streams.frames("recurrent", 24)
    sim = qtk.QuantSim(streams.stream("recurrent"), batches[0])
    sim.compute_encodings(batches, progress=False)
    found = sim.drift(batches, steps=30, progress=False).sqnr_db
    assert float(sim.model.h.abs().sum()) == float(sim.model.steps) == 0
    model = streams.stream("recurrent")
    with torch.no_grad():
        for step in range(30):
            y, z = model(*batches[step % 24]), sim.model(*batches[step % 24])
            expected = 10 * torch.log10(y.double().square().sum() / (y.double() - z.double()).square().sum())
            assert found[step] == pytest.approx(float(expected), abs=0.05)


@pytest.mark.medium
def test_without_states_there_is_nothing_to_measure():
    sim, batches = stream()
    with pytest.raises(CalibrationError, match=r"name the inputs .*QuantSim\(…, states=.*, or register what "):
        sim.drift(batches, progress=False)
    with pytest.raises(CalibrationError, match="steps must be at least 1"):
        stream(states={"h": 1})[0].drift(batches, steps=0, progress=False)
