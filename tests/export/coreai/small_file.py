"""A small net by the target coreai, and its file, made once in a process."""

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
    importlib.util.find_spec("coreai_torch") is None, reason="coreai-torch is not installed")


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 5)).eval()


@cache
def small() -> tuple[qtk.QuantSim, torch.Tensor, Path]:
    """The simulation, inputs of eight rows, and the folder of its export."""
    torch.manual_seed(0)
    model = net()
    x = torch.randn(8, 3, 6, 6)
    sim = qtk.QuantSim(model, x, config="coreai")
    sim.compute_encodings([x], progress=False)
    folder = Path(tempfile.mkdtemp()) / "out"
    sim.export(folder, formats=("coreai", "pt2e"), progress=False)
    return sim, x, folder
