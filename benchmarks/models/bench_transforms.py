"""Times the transforms in multiples of the float model's forward pass over the same batches.

Each turn runs the original model over all batches, then every transform on a new simulation, whose making is not
timed. Each figure is the median over the turns, each ratio the median of ratios within a turn. Weights are random; two
channels of every norm are outliers, so that there is something to do. No time is printed unless a transform rewrites
something and keeps the float outputs. A ``*`` behind the commit means that the working tree held changes.

    python benchmarks/models/bench_transforms.py --output figures.csv
    python benchmarks/models/bench_transforms.py --models vit_small_patch16_224 --transforms smooth_quant --repeats 3
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
from qtk.quantizers.modes import in_mode
from qtk.quantizers.quantizer import Mode
from qtk.transforms.result import TransformResult

MODELS = ("vit_small_patch16_224", "resnet50")
FORWARD = "original fp32 forward"
LARGEST_CHANGE = 1e-4
"""Of an output, relative to its largest value."""


@dataclass(frozen=True)
class Transform:
    """A transform to time.

    ``run``: applies it to a simulation, given batches. ``fold_batch_norms``: whether the simulation folds them before.
    ``limit``: multiples of the forward pass that it may take.
    """

    run: Callable[[qtk.QuantSim, list[Tensor]], TransformResult]
    limit: float
    fold_batch_norms: bool = True


TRANSFORMS = {
    "fold_batch_norms": Transform(lambda sim, batches: qtk.fold_batch_norms(sim), 0.5, fold_batch_norms=False),
    "smooth_quant": Transform(lambda sim, batches: qtk.apply_smooth_quant(sim, batches, progress=False), 4.0),
    "equalize": Transform(lambda sim, batches: qtk.equalize_model(sim), 1.0),
}


@dataclass(frozen=True)
class Figure:
    """Cost of one transform on one model."""

    model: str
    transform: str
    applied: int
    median_s: float
    ratio: float
    ratio_low: float
    ratio_high: float
    limit: float


def measure(
    name: str, transforms: list[str], *, num_batches: int, batch_size: int, repeats: int, progress: tqdm
) -> list[Figure]:
    """Raises: SystemExit if a transform changes the float outputs."""
    torch.manual_seed(0)
    model = with_outliers(timm.create_model(name).eval())
    size = model.default_cfg["input_size"]
    batches = [torch.randn(batch_size, *size) for _ in range(num_batches)]
    prepared = qtk.prepare_model(model, batches[0])
    expected = outputs(model, batches[0])
    seconds: dict[str, list[float]] = {each: [] for each in (FORWARD, *transforms)}
    applied = dict.fromkeys(transforms, 0)
    for turn in range(repeats):
        progress.set_description(f"{name}: {FORWARD}")
        seconds[FORWARD].append(timed(lambda: [outputs(model, batch) for batch in batches]))
        for each in transforms:
            progress.set_description(f"{name}: {each}")
            config = {"version": 1, "extends": "default", "fold_batch_norms": TRANSFORMS[each].fold_batch_norms}
            sim = qtk.QuantSim(prepared, batches[0], config=config)
            results: list[TransformResult] = []
            taken = timed(lambda each=each, sim=sim, into=results: into.append(TRANSFORMS[each].run(sim, batches)))
            seconds[each].append(taken)
            applied[each] = len(results[0].applied)
            if not turn:
                prove(name, each, sim, batches[0], expected)
            progress.update()
    figures = []
    for each in transforms:
        if not applied[each]:
            tqdm.write(f"{name}: {each} finds nothing to do")
            continue
        ratios = [mine / base for mine, base in zip(seconds[each], seconds[FORWARD], strict=True)]
        spread = median(ratios), min(ratios), max(ratios)
        figures.append(Figure(name, each, applied[each], median(seconds[each]), *spread, TRANSFORMS[each].limit))
    return figures


def with_outliers(model: nn.Module) -> nn.Module:
    """Makes two channels of every norm 40 times as large."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, (nn.LayerNorm, nn.BatchNorm2d)) and module.weight is not None:
                module.weight[:2] *= 40
    return model


def prove(name: str, transform: str, sim: qtk.QuantSim, batch: Tensor, expected: Tensor) -> None:
    with in_mode(sim.quantizers.values(), Mode.BYPASS):
        change = float((outputs(sim.model, batch) - expected).abs().max() / expected.abs().max())
    if not change <= LARGEST_CHANGE:
        raise SystemExit(f"{name}: {transform} changes the float outputs by {change:.1e}; no time is given")


@torch.no_grad()
def outputs(model: nn.Module, batch: Tensor) -> Tensor:
    result: Tensor = model(batch)
    return result


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, help="timm names")
    parser.add_argument("--transforms", nargs="+", default=list(TRANSFORMS), choices=TRANSFORMS)
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, help="CSV file to write")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    figures: list[Figure] = []
    with tqdm(total=len(arguments.transforms) * arguments.repeats * len(arguments.models), unit="run") as progress:
        for name in arguments.models:
            figures += measure(
                name, arguments.transforms, num_batches=arguments.batches, batch_size=arguments.batch_size,
                repeats=arguments.repeats, progress=progress,
            )
    setting = {
        "commit": commit(), "torch": torch.__version__, "threads": arguments.threads, "batches": arguments.batches,
        "batch_size": arguments.batch_size, "repeats": arguments.repeats,
    }
    print(", ".join(f"{key} {value}" for key, value in setting.items()))
    columns = f"{'applied':>8}{'median s':>10}{'× fp32':>8}{'lowest':>8}{'highest':>8}{'limit':>7}"
    print(f"{'model':<24}{'transform':<20}{columns}")
    for figure in figures:
        print(
            f"{figure.model:<24}{figure.transform:<20}{figure.applied:>8}{figure.median_s:>10.3f}{figure.ratio:>8.2f}"
            f"{figure.ratio_low:>8.2f}{figure.ratio_high:>8.2f}{figure.limit:>7.1f}"
        )
    if arguments.output:
        with arguments.output.open("w", newline="", encoding="utf-8") as file:
            rows = [{**setting, **asdict(figure)} for figure in figures]
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
