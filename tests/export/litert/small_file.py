"""A small convolutional net by the target litert, and its file, made once in a process."""

from __future__ import annotations

import importlib.util
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import qtk

needs_converter = pytest.mark.skipif(
    importlib.util.find_spec("litert_torch") is None, reason="litert-torch is not installed")


@cache
def small() -> tuple[qtk.QuantSim, torch.Tensor, Path]:
    """The simulation, inputs of eight rows, and the folder of its export."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5)).eval()
    x = torch.randn(8, 3, 6, 6)
    sim = qtk.QuantSim(model, x, config="litert")
    sim.compute_encodings([x], progress=False)
    folder = Path(tempfile.mkdtemp()) / "out"
    sim.export(folder, formats=("litert", "pt2e"))
    return sim, x, folder
