"""Times calibration, simulation and training in multiples of the original float model's time.

Over the same batches run: the original model, the prepared model with every quantizer bypassed, ``compute_encodings``
(scheme min_max, weights and activations) and the W8A8 simulation; then training steps (forward, backward, SGD; ranges
fixed) of the original and of the simulation. They take turns inside one process; each figure is the median over the
repeats, each ratio the median of ratios within a repeat. Weights are random: the time does not depend on them. No speed
is printed unless the bypassed model is the original, up to the rounding of batch norms that are folded into layers.
Calibration and simulation each pay for the weights once a repeat. A ``*`` behind the commit means that the
working tree held changes.

    python benchmarks/models/bench_calibration.py --output figures.csv
    python benchmarks/models/bench_calibration.py --models resnet18 --batches 2 --repeats 3
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import timm
import torch
from torch import Tensor, nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))

from turns import commit

import qtk
from qtk.numerics.error import sqnr_db
from qtk.quantizers.modes import in_mode
from qtk.quantizers.quantizer import Mode

MODELS = ("vit_small_patch16_224", "resnet50")
ORIGINAL = "original fp32 forward"
TRAINING, SIMULATED_TRAINING = "original fp32 training step", "simulated training step"
BASES = {TRAINING: TRAINING, SIMULATED_TRAINING: TRAINING}
"""The baseline of an action, where it is not the original forward."""
ROUNDING = 1e-5
"""Of the largest output: what folding batch norms may change."""


@dataclass(frozen=True)
class Figure:
    """Cost of one action on one model."""

    model: str
    action: str
    median_s: float
    ratio: float
    ratio_low: float
    ratio_high: float


def measure(name: str, *, num_batches: int, batch_size: int, repeats: int, progress: tqdm) -> list[Figure]:
    """Raises: SystemExit if the bypassed model is not the original, or the simulation changes nothing."""
    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    size = model.default_cfg["input_size"]
    batches = [torch.randn(batch_size, *size) for _ in range(num_batches)]
    sim = qtk.QuantSim(model, batches[0])
    prove(name, model, sim, batches)

    def bypassed() -> None:
        with in_mode(sim.quantizers.values(), Mode.BYPASS):
            forward(sim.model, batches)

    actions: dict[str, Callable[[], object]] = {
        ORIGINAL: lambda: forward(model, batches),
        "prepared, bypassed": bypassed,
        "compute_encodings (min_max)": lambda: sim.compute_encodings(batches, progress=False),
        "simulated W8A8 forward": lambda: forward(sim.model, batches),
        TRAINING: lambda: train(model, batches),
        SIMULATED_TRAINING: lambda: train(sim.model, batches),
    }
    seconds: dict[str, list[float]] = {action: [] for action in actions}
    for _ in range(repeats):
        for action, run in actions.items():
            progress.set_description(f"{name}: {action}")
            start = time.perf_counter()
            run()
            seconds[action].append(time.perf_counter() - start)
            progress.update()
    figures = []
    for action, taken in seconds.items():
        ratios = [mine / base for mine, base in zip(taken, seconds[BASES.get(action, ORIGINAL)], strict=True)]
        figures.append(Figure(name, action, median(taken), median(ratios), min(ratios), max(ratios)))
    return figures


def prove(name: str, model: nn.Module, sim: qtk.QuantSim, batches: list[Tensor]) -> None:
    """Checks correctness; also the warm-up."""
    sim.compute_encodings(batches[:1], progress=False)
    for number, batch in enumerate(batches):
        expected = outputs(model, batch)
        with in_mode(sim.quantizers.values(), Mode.BYPASS):
            got = outputs(sim.model, batch)
        worst = float((got - expected).abs().max() / expected.abs().max())
        if not worst <= ROUNDING:
            raise SystemExit(f"{name}: bypassed is off the original on batch {number} by {worst:g} of its largest "
                             "output; no speed is given")
    simulated = outputs(sim.model, batches[0])
    expected = outputs(model, batches[0])
    if torch.equal(simulated, expected) or not torch.isfinite(simulated).all():
        raise SystemExit(f"{name}: the simulation quantizes nothing, or is not finite; no speed is given")
    loss_db = sqnr_db(expected, simulated)
    tqdm.write(f"{name}: bypassed is off the original by {worst:.1g}; W8A8 SQNR {loss_db:.1f} dB (random weights)")


@torch.no_grad()
def outputs(model: nn.Module, batch: Tensor) -> Tensor:
    result: Tensor = model(batch)
    return result


def forward(model: nn.Module, batches: list[Tensor]) -> None:
    for batch in batches:
        outputs(model, batch)


def train(model: nn.Module, batches: list[Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # the weights stay: the next turn computes the same
    model.train()
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, help="timm names")
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, help="CSV file to write")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    figures: list[Figure] = []
    with tqdm(total=6 * arguments.repeats * len(arguments.models), unit="run") as progress:
        for name in arguments.models:
            figures += measure(
                name, num_batches=arguments.batches, batch_size=arguments.batch_size, repeats=arguments.repeats,
                progress=progress,
            )
    setting = {
        "commit": commit(), "torch": torch.__version__, "threads": arguments.threads, "batches": arguments.batches,
        "batch_size": arguments.batch_size, "repeats": arguments.repeats,
    }
    print(", ".join(f"{key} {value}" for key, value in setting.items()))
    print(f"{'model':<24}{'action':<30}{'median s':>10}{'× fp32':>9}{'lowest':>9}{'highest':>9}")
    for figure in figures:
        print(
            f"{figure.model:<24}{figure.action:<30}{figure.median_s:>10.3f}{figure.ratio:>9.2f}"
            f"{figure.ratio_low:>9.2f}{figure.ratio_high:>9.2f}"
        )
    if arguments.output:
        with arguments.output.open("w", newline="", encoding="utf-8") as file:
            rows = [{**setting, **asdict(figure)} for figure in figures]
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
