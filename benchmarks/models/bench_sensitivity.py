"""Time of the gradient part of ``sim.sensitivity``, as a multiple of a calibration on the same data.

    python benchmarks/models/bench_sensitivity.py [--models deep vit_tiny resnet18]

``deep`` has 200 weighted layers: 100 residual blocks of two. Medians of three runs in turns.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from statistics import median

import torch
from planted_faults import model_and_data
from torch import Tensor, nn

import qtk


class Block(nn.Module):
    """Two 3×3 convolutions beside a sum."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        with torch.no_grad():
            self.second.weight.mul_(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x).relu())


def deep() -> tuple[nn.Module, list[Tensor]]:
    """200 convolutions."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(32) for _ in range(100)), nn.Flatten(), nn.Linear(32 * 256, 10))
    return model.eval(), [torch.randn(16, 32, 16, 16) for _ in range(2)]


def loss(output: object, batch: object) -> Tensor:
    """Cross entropy against the first class."""
    assert isinstance(output, Tensor)
    return nn.functional.cross_entropy(output, torch.zeros(len(output), dtype=torch.long))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=("deep", "vit_tiny", "resnet18", "small_bert"))
    for name in parser.parse_args().models:
        model, data = deep() if name == "deep" else model_and_data(name)
        for scheme in ("min_max", "mse"):
            sim = qtk.QuantSim(model, data[0], scheme=scheme)
            runs = {"calibration": partial(sim.compute_encodings, data, progress=False),
                    "squared error": partial(sim.sensitivity, data, top=0, progress=False),
                    "loss": partial(sim.sensitivity, data, top=0, progress=False, loss=loss)}
            seconds: dict[str, list[float]] = {what: [] for what in runs}
            for _ in range(3):
                for what, run in runs.items():
                    begin = time.perf_counter()
                    run()
                    seconds[what].append(time.perf_counter() - begin)
            calibration = median(seconds["calibration"])
            print(f"{name}, {scheme}, {len(sim.quantizers)} sites: calibration {calibration:.2f} s; sensitivity "
                  f"{median(seconds['squared error']) / calibration:.2f} ×, with a loss "
                  f"{median(seconds['loss']) / calibration:.2f} ×", flush=True)


if __name__ == "__main__":
    main()
