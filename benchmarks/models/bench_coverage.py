"""Measures how many public models qtk can capture, and how much of each it quantizes.

One model of every family of timm and torchvision, and the hand-made models of ``tests/zoo``, each in a process of its
own with a time limit: prepared, compared with the original, quantized to W8A8, run and exported. Random weights.
What is quantized is counted by watching the ops that run (``products.py``), so that code which stayed Python counts as
what it is. ``export_s`` is plain ``torch.export`` of the same model in the same process; SQNR is that of all float
outputs against the original, on inputs that did not calibrate (none if a detector with random weights finds nothing).

    python benchmarks/models/bench_coverage.py --csv coverage.csv
    python benchmarks/models/bench_coverage.py --groups handmade detection --only "*rcnn*"
    python benchmarks/models/bench_coverage.py --csv coverage.csv --resume
"""

from __future__ import annotations

import argparse
import csv
import fnmatch
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils import _pytree as pytree
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

GROUPS = ("handmade", "timm", "classification", "segmentation", "detection", "video", "optical_flow")
QUICK = 5
TOLERANCE = 1e-5
"""Largest difference, relative to the largest output, at which outputs count as equal."""


@dataclass
class Coverage:
    """The results of one model; fields after an error stay empty."""

    group: str
    model: str
    parameters: int = 0
    rung: str = ""
    prepared: bool = False
    difference: float = math.nan
    quantized: bool = False
    finite: bool = False
    weighted: int = 0
    weighted_quantized: int = 0
    activations: int = 0
    activations_quantized: int = 0
    sqnr_db: float = math.nan
    exported: bool = False
    prepare_s: float = math.nan
    export_s: float = math.nan
    total_s: float = math.nan
    peak_gib: float = math.nan
    error: str = ""

    @property
    def equal(self) -> bool:
        return self.difference <= TOLERANCE


def measure(group: str, name: str) -> Coverage:
    """Measures one model; an error ends the measurement and is recorded."""
    from benchmarks.models.coverage_models import build

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found, started = Coverage(group, name), time.perf_counter()
    try:
        model, inputs = build(group, name)
        found.parameters = sum(parameter.numel() for parameter in model.parameters())
        _measure(model, inputs, found)
    except Exception as error:
        found.error = f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0][:300]
    found.total_s = time.perf_counter() - started
    found.peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return found


def _measure(model: torch.nn.Module, inputs: object, found: Coverage) -> None:
    import qtk
    from benchmarks.models.products import count_products
    from qtk.numerics.error import decibels

    args, kwargs = inputs(0)
    with torch.no_grad():
        model(*args, **kwargs)  # the first run pays for what every later one has
        expected = model(*args, **kwargs)
    _export_s(torch.nn.Sequential(torch.nn.Conv2d(2, 2, 1), torch.nn.ReLU()), (torch.randn(2, 2, 4, 4),), {})
    found.export_s = _export_s(model, args, kwargs)
    started = time.perf_counter()
    prepared = qtk.prepare_model(model, args or kwargs)
    found.prepare_s = time.perf_counter() - started
    found.prepared, found.rung = True, prepared.report.rung
    with torch.no_grad():
        found.difference = _difference(expected, prepared(*args, **kwargs))
    sim = qtk.QuantSim(prepared, args or kwargs, in_place=True)
    sim.compute_encodings([inputs(1), inputs(2)], forward=lambda m, batch: m(*batch[0], **batch[1]), progress=False)
    found.quantized = True
    products = count_products(sim.model, *inputs(0))
    for field, value in asdict(products).items():
        setattr(found, field, value)
    args, kwargs = inputs(3)
    with torch.no_grad():
        exact, simulated = model(*args, **kwargs), sim.model(*args, **kwargs)
    signal, noise, found.finite = _error(exact, simulated)
    found.sqnr_db = decibels(signal, noise) if signal and not math.isnan(noise) else math.nan
    with tempfile.TemporaryDirectory() as folder:
        sim.export(Path(folder) / "all")
        found.exported = True


def _export_s(model: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> float:
    from qtk.capture.torch_export import free_shapes, silent_torch

    started = time.perf_counter()
    try:
        with silent_torch():
            torch.export.export(model, args, kwargs, dynamic_shapes=free_shapes(model, args, kwargs), strict=False)
    except Exception:
        return math.nan
    return time.perf_counter() - started


def _floats(tree: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _difference(expected: object, got: object) -> float:
    """The largest difference, relative to the largest expected value."""
    pairs = list(zip(_floats(expected), _floats(got), strict=True))
    if any(a.shape != b.shape for a, b in pairs):
        return math.inf
    gaps = [float((a - b).abs().max() / a.abs().max().clamp(min=1e-30)) for a, b in pairs if a.numel()]
    return max(gaps, default=0.0)


def _error(exact: object, simulated: object) -> tuple[float, float, bool]:
    """Signal, noise (NaN if the outputs have other shapes, as a detector's may), and whether all numbers are finite."""
    signal = noise = 0.0
    finite = all(bool(b.isfinite().all()) for b in _floats(simulated))
    for a, b in zip(_floats(exact), _floats(simulated), strict=True):
        if a.shape != b.shape:
            return signal, math.nan, finite
        signal += float(a.double().square().sum())
        noise += float((a.double() - b.double()).square().sum())
    return signal, noise, finite


def run(group: str, name: str, time_limit_s: float) -> Coverage:
    """Measures one model in a subprocess."""
    command = [sys.executable, str(Path(__file__).resolve()), "--one", group, name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=time_limit_s, check=False)
    except subprocess.TimeoutExpired:
        return Coverage(group, name, error=f"more than {time_limit_s:.0f} s", total_s=time_limit_s)
    try:
        return Coverage(**json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError, TypeError):
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return Coverage(group, name, error=last[:300])


def table(rows: list[Coverage]) -> Table:
    shown = Table(title="coverage")
    for heading in ("group", "model", "rung", "equal", "weighted ops", "matmuls", "SQNR dB", "exported", "prepare s",
                    "÷ export", "error"):
        shown.add_column(heading, overflow="fold")
    for row in sorted(rows, key=lambda row: (not row.error, row.equal and row.finite, row.group, row.model)):
        shown.add_row(
            row.group, row.model, row.rung or "–", "bit" if row.difference == 0 else "yes" if row.equal else "no",
            f"{row.weighted_quantized}/{row.weighted}", f"{row.activations_quantized}/{row.activations}",
            f"{row.sqnr_db:.1f}", "yes" if row.exported else "no", f"{row.prepare_s:.1f}",
            f"{row.prepare_s / row.export_s:.1f}", row.error,
        )
    return shown


def summary(rows: list[Coverage]) -> list[str]:
    """One line a figure, over each group and all."""
    lines = []
    for group in (*dict.fromkeys(row.group for row in rows), "all"):
        own = [row for row in rows if group in (row.group, "all")]
        weighted, activations = sum(row.weighted for row in own), sum(row.activations for row in own)
        ratios = [row.prepare_s / row.export_s for row in own if not math.isnan(row.prepare_s / row.export_s)]
        lines.append(
            f"{group}: {len(own)} models, prepared {sum(row.prepared for row in own)}, "
            f"equal {sum(row.equal for row in own)} (bit-equal {sum(row.difference == 0 for row in own)}), "
            f"quantized and finite {sum(row.finite for row in own)}, exported {sum(row.exported for row in own)}, "
            f"weighted ops {sum(row.weighted_quantized for row in own) / max(weighted, 1):.1%} of {weighted}, "
            f"activation matmuls {sum(row.activations_quantized for row in own) / max(activations, 1):.1%} of "
            f"{activations}, prepare ÷ export median {median(ratios) if ratios else math.nan:.2f}"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--only", default="*", help="names of models, with * and ?")
    parser.add_argument("--quick", action="store_true", help=f"the hand-made models and {QUICK} of each other group")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--time-limit", type=float, default=600.0, help="seconds for one model")
    parser.add_argument("--csv", type=Path, help="where a row is written as each model is done")
    parser.add_argument("--resume", action="store_true", help="leave out the models that the CSV has")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(asdict(measure(*options.one))))
        return
    from benchmarks.models.coverage_models import names

    done: list[Coverage] = []
    if options.resume and options.csv and options.csv.exists():
        done = [_from_row(row) for row in csv.DictReader(options.csv.open(encoding="utf-8"))]
    known = {(row.group, row.model) for row in done}
    jobs = []
    for group in options.groups:
        own = [name for name in names(group) if fnmatch.fnmatch(name, options.only)]
        jobs += [(group, name) for name in (own[:QUICK] if options.quick and group != "handmade" else own)]
    jobs = [job for job in jobs if job not in known]
    with ThreadPoolExecutor(options.jobs) as pool:
        futures = [pool.submit(run, *job, options.time_limit) for job in jobs]
        for future in tqdm(futures, unit="model"):
            done.append(future.result())
            if options.csv:
                _write(options.csv, done)
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(table(done))
    for line in summary(done):
        console.print(line, highlight=False)


def _write(path: Path, rows: list[Coverage]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Coverage)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def _from_row(row: dict[str, str]) -> Coverage:
    kinds = {"int": int, "float": float, "str": str, "bool": lambda text: text == "True"}
    return Coverage(**{field.name: kinds[str(field.type)](row[field.name]) for field in fields(Coverage)})


if __name__ == "__main__":
    main()
