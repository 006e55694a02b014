"""What a batch norm behind a ReLU costs in ONNX Runtime, in front of padded convolutions: conv, ReLU, norm, conv, ….

Three ways, in one process and in turns: as a scale and a shift; with the scale in the convolution behind it and a sum
in front (by hand); and as ``fold_batch_norms`` does, with the scale in the convolution in front of the ReLU and a sum.
Prints nodes of the optimized file, SQNR of the simulation to the float model (mean of four nets), milliseconds of one
of them (median, one thread). Random weights, scales of both signs.

    python benchmarks/models/bench_rectified_norms.py
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from unittest import mock

import onnx
import onnxruntime
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import qtk
from qtk.numerics.error import decibels
from qtk.runtimes.session import create_session
from qtk.transforms import foldable_batch_norms
from qtk.transforms.foldable_batch_norms import _NotFoldable

NORMS, TURNS, NETS = 4, 25, 4
BATCHES = (1, 16)
SIZES = ((64, 28), (32, 56))
"""Channels and lengths of the images."""


class Sum(nn.Module):
    """Adds a vector. Shape: x [N, C, H, W]."""

    def __init__(self, vector: Tensor) -> None:
        super().__init__()
        self.vector = nn.Parameter(vector.reshape(-1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.vector


def net(channels: int, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1), nn.ReLU()]
    for _ in range(NORMS):
        norm = nn.BatchNorm2d(channels)
        nn.init.uniform_(norm.running_mean, 0.1, 0.4)  # type: ignore[arg-type]
        nn.init.uniform_(norm.running_var, 0.3, 1.5)  # type: ignore[arg-type]
        nn.init.uniform_(norm.weight, -1.5, 1.5)
        nn.init.normal_(norm.bias, 0, 0.3)
        layers += [norm, nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)).eval()


def behind(model: nn.Sequential) -> nn.Sequential:
    """The same function, with each scale in the convolution behind its batch norm."""
    layers = list(model)
    for index, norm in enumerate(layers):
        if isinstance(norm, nn.BatchNorm2d):
            assert norm.running_var is not None
            assert norm.running_mean is not None
            scale = norm.weight / torch.sqrt(norm.running_var + norm.eps)
            layer = layers[index + 1]
            assert isinstance(layer, nn.Conv2d)
            with torch.no_grad():
                layer.weight.mul_(scale.reshape(1, -1, 1, 1))
            layers[index] = Sum((norm.bias / scale - norm.running_mean).detach())
    return nn.Sequential(*layers).eval()


def simulated(model: nn.Module, x: Tensor) -> tuple[qtk.QuantSim, float]:
    """A simulation and its SQNR."""
    sim = qtk.QuantSim(model, x, config="onnxruntime")
    sim.compute_encodings([x], progress=False)
    reference = model(x)
    error = reference - sim.model(x)
    return sim, decibels(reference.square().sum().item(), error.square().sum().item())


def exported(sim: qtk.QuantSim, folder: Path) -> tuple[onnxruntime.InferenceSession, int]:
    """A session of the file of a simulation, and the nodes that it executes."""
    sim.export(folder, formats=("onnx",), check=False, progress=False)
    session, _ = create_session(folder / "model.onnx", threads=1, optimized_file=folder / "optimized.onnx")
    return session, len(onnx.load(folder / "optimized.onnx").graph.node)


def refused(*_: object) -> None:
    raise _NotFoldable("left for comparison")


def measured(channels: int, length: int, folder: Path) -> list[list[str]]:
    """A row for each way and batch size."""
    torch.manual_seed(0)
    x = torch.rand(16, 3, length, length) * 2 - 1
    sqnr: dict[str, list[float]] = {}
    found = {}
    with torch.no_grad():
        for seed in range(NETS):
            with mock.patch.object(foldable_batch_norms._Finder, "_rectified", refused):
                sims = {"scale and shift": simulated(net(channels, seed), x)}
            sims["scale behind, sum"] = simulated(behind(net(channels, seed)), x)
            sims["scale in front, sum"] = simulated(net(channels, seed), x)
            for name, (sim, decibels_) in sims.items():
                sqnr.setdefault(name, []).append(decibels_)
                if not seed:
                    found[name] = exported(sim, folder / name)
    rows = []
    for batch in BATCHES:
        feed = {next(iter(found.values()))[0].get_inputs()[0].name: x[:batch].numpy()}
        times: dict[str, list[float]] = {name: [] for name in found}
        for _ in range(TURNS):
            for name in random.sample(list(found), len(found)):
                start = time.perf_counter()
                found[name][0].run(None, feed)
                times[name].append(time.perf_counter() - start)
        rows += [[f"{channels} × {length}²", str(batch), name, str(nodes), f"{statistics.mean(sqnr[name]):.1f}",
                  f"{statistics.median(times[name]) * 1000:.2f}"] for name, (_, nodes) in found.items()]
    return rows


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    warnings.simplefilter("ignore")
    table = Table(title="batch norms behind ReLU, ONNX Runtime, one thread", title_justify="left")
    for heading in ("channels × length²", "batch", "way", "nodes", "SQNR, dB", "ms"):
        table.add_column(heading)
    for channels, length in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            for cells in measured(channels, length, Path(folder)):
                table.add_row(*cells)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
