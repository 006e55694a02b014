"""``qtk.assign_bits`` under milliseconds in a target's runtime, measured again afterwards from the exported file.

The budget lies between the latencies of the model in 8 bits and with all products in float, which are measured first;
weights of timm's models are random. The file is measured in turns with the model in 8 bits: "again" is their ratio
times what the search measured for 8 bits, since a machine's speed drifts by more than 5 % within the minutes that a
search takes. ``--quantize``: ``qtk.quantize`` under the same budget, its error and milliseconds likewise.
``--cpu-time`` counts milliseconds of CPU time, for machines that other processes use too.

    python benchmarks/models/assign_latency.py [--models vit_tiny_patch16_224 resnet18] [--shares 0.4 0.7] [--turns 60]
    python benchmarks/models/assign_latency.py --models digits_cnn --targets openvino --rows 64 --shares 0.5 --quantize
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path

import timm
import torch
from torch import nn

import qtk
from qtk.analysis.float_outputs import sqnr_db
from qtk.auto import latency
from qtk.auto.bit_assignment import BitAssignment
from qtk.demo.digits import load_digits_split
from qtk.demo.models import DEMO_MODELS
from qtk.demo.models import build as demo
from qtk.report.table import Column, Table
from qtk.runtimes.kinds import runtime_of
from qtk.runtimes.latency import median_latencies_ms


def float_model(name: str) -> nn.Module:
    """The model; norms that timm starts at 0, which would leave nothing of residual branches, start at 1."""
    if name in DEMO_MODELS:
        return demo(name)
    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and not module.weight.any():
            nn.init.ones_(module.weight)
    return model


def data(name: str, rows: int) -> list[torch.Tensor]:
    """Batches of two images at least, the first of ``rows``."""
    count = max(rows, 2)
    if name in DEMO_MODELS:
        return list(load_digits_split().train_images[:4 * count].split(count))
    return list(torch.randn(4, count, 3, 224, 224, generator=torch.Generator().manual_seed(0)))


def simulated(name: str, x: torch.Tensor, target: str) -> qtk.QuantSim:
    return qtk.QuantSim(float_model(name), x, config=target)


def quantized(name: str, batches: list[torch.Tensor], rows: int, target: str) -> qtk.QuantSim:
    """The model in 8 bits."""
    sim = simulated(name, batches[0][:rows], target)
    sim.compute_encodings(batches, progress=False)
    return sim


def costs_by_name(found: BitAssignment) -> dict[str, float]:
    """Milliseconds of the assignments that were measured."""
    return {each.what: each.cost for each in found.measured}


def searched(
    name: str, batches: list[torch.Tensor], rows: int, target: str, budget: float
) -> tuple[qtk.QuantSim, BitAssignment, float]:
    """A simulation under the budget, what was found, and the seconds it took."""
    sim = simulated(name, batches[0][:rows], target)
    started = time.perf_counter()
    found = qtk.assign_bits(sim, batches, budget={"milliseconds": budget}, progress=False)
    return sim, found, time.perf_counter() - started


def again(sims: dict[str, qtk.QuantSim], x: torch.Tensor, target: str, turns: int) -> dict[str, float]:
    """Latencies of files that are exported and opened anew, in turns."""
    kind = runtime_of(target)
    with tempfile.TemporaryDirectory() as folder:
        runs = {}
        for name, sim in sims.items():
            sim.export(Path(folder) / name, formats=(kind.format,))
            runs[name] = kind.load(Path(folder) / name / kind.file_name(""))({"x": x})
        return latency.median_latencies_ms(runs, turns=turns)


def row(name: str, target: str, budget: float, arguments: argparse.Namespace, ends: tuple[float, float]) -> list[str]:
    """The model under a budget; ``ends``: its latencies in 8 bits and in float."""
    batches, rows = data(name, arguments.rows), arguments.rows
    low, high = ends
    sim, found, seconds = searched(name, batches, rows, target, budget)
    sims = {"assigned": sim, "8 bits": quantized(name, batches, rows, target)}
    if arguments.quantize:
        best, account = qtk.quantize(float_model(name), batches, target=target, max_drop=0.0, progress=False,
                                     example_inputs=batches[0][:rows], budget={"milliseconds": budget})
        sims["quantized"] = best
    measured = again(sims, batches[0][:rows], target, arguments.turns)
    drift = costs_by_name(found)["all 8 bits"] / measured["8 bits"]
    floats = sum(each.width == "float" for each in found.rows)
    (equal,) = (sqnr_db(each.loss) for each in found.measured if each.what == "all 8 bits")
    shown = ("–" if math.isnan(each) else f"{each:.3g}" for each in (low, high))
    cells = [name, target, *shown, f"{budget:.3g}", f"{found.cost:.3g}",
             f"{measured['assigned'] * drift:.3g}", f"{drift:.2f}", f"{equal:.1f}",
             f"{sqnr_db(found.measured[0].loss):.1f}", f"{floats} of {len(found.rows)}", f"{seconds:.0f}"]
    if arguments.quantize:
        trial = account.best
        cells += ["–"] * 3 if trial is None or trial.drop is None else [
            f"{sqnr_db(trial.drop):.1f}", f"{trial.latency_ms:.3g}", f"{measured['quantized'] * drift:.3g}"]
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["vit_tiny_patch16_224", "resnet18"], help="of digits, or timm")
    parser.add_argument("--targets", nargs="+", default=["onnxruntime"])
    parser.add_argument("--rows", type=int, default=1, help="of a call")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.4, 0.7])
    parser.add_argument("--budgets", nargs="+", type=float, help="in milliseconds, in place of shares: for runtimes "
                        "where all sites in float quantize nothing, so that no search measures it")
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--cpu-time", action="store_true", help="milliseconds of CPU time")
    parser.add_argument("--quantize", action="store_true", help="qtk.quantize as well")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.cpu_time:
        latency.median_latencies_ms = partial(median_latencies_ms, clock=time.process_time)
    rows = []
    for name in arguments.models:
        for target in arguments.targets:
            low, high, budgets = math.nan, math.nan, arguments.budgets
            if budgets is None:
                _, loose, _ = searched(name, data(name, arguments.rows), arguments.rows, target, 1e6)
                costs = costs_by_name(loose)
                low, high = costs["all 8 bits"], costs.get("all float", max(costs.values()))
                budgets = [low + share * (high - low) for share in arguments.shares]
            for budget in budgets:
                rows.append(tuple(row(name, target, budget, arguments, (low, high))))
                print(" | ".join(rows[-1]), flush=True)
    headings = ("model", "target", "8 bits, ms", "float, ms", "budget, ms", "found, ms", "again, ms", "drift",
                "SQNR in 8 bits, dB", "SQNR, dB", "sites in float", "s",
                *(("qtk.quantize: SQNR, dB", "ms", "again, ms") if arguments.quantize else ()))
    print(Table("milliseconds", tuple(Column(each, number=index > 1) for index, each in enumerate(headings)),
                tuple(rows)).text())


if __name__ == "__main__":
    main()
