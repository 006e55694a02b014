"""Simulations made in several threads at once are those made one after the other."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import qtk

WIDTHS = range(4, 12)


def simulated(width):
    generator = torch.Generator().manual_seed(width)
    model = nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    x = torch.randn(16, width, generator=generator)
    sim = qtk.QuantSim(model, x)
    sim.compute_encodings([x, 2 * x], progress=False)
    return sim, x


@pytest.mark.slow
def test_four_threads_find_what_one_finds():
    expected = [simulated(width) for width in WIDTHS]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(simulated, WIDTHS))
    for (sim, x), (other, _) in zip(expected, found, strict=True):
        encodings = sim.encodings()
        assert encodings.keys() == other.encodings().keys() == {"input:input", "0.weight", "1:out", "2.weight", "2:out"}
        assert all(encodings[name].equals(encoding) for name, encoding in other.encodings().items())
        assert torch.equal(sim.model(x), other.model(x))
