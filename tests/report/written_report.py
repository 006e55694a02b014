"""Writes the report of a small convolutional model in 4 bits."""

import torch
from torch import nn

import qtk

BATCHES = torch.randn(3, 16, 8, generator=torch.Generator().manual_seed(0)).unbind(0)


def simulation():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(4, 6, 1), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)).eval()
    sim = qtk.QuantSim(model, BATCHES[0].reshape(-1, 4, 2), weight_bits=4)
    data = [batch.reshape(-1, 4, 2) for batch in BATCHES]
    sim.compute_encodings(data, progress=False)
    return sim, data


def written(tmp_path, **settings):
    sim, data = simulation()
    path = tmp_path / "report.html"
    sim.report(path, data, progress=False, **settings)
    return sim, data, path.read_text(encoding="utf-8")
