"""Times simulated forwards and calibration in multiples of the float model's forward, eager and compiled.

The ways: the float model; its W8A8 simulation (default target); the same graph with ``torch.fake_quantize_*`` in place
of qtk's operator; each also compiled by Inductor; ``compute_encodings`` (min_max), a pass over the data in eager mode.
On a GPU each way is replayed as a CUDA graph, too, eager and compiled: what is left without the host. Way by way in
turns, medians of ratios within a turn; compiled ways against the compiled float model, graphs against its graph.
Eager, qtk quantizes the weights once, as its own functions do; torch's operator, compiled ways and graphs do so in
every forward. Weights are random: the time does not depend on them.

    python benchmarks/models/bench_simulation.py --device cuda --csv simulation.csv
    python benchmarks/models/bench_simulation.py --quick
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import timm
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from bench_qat import seconds, with_torchs_operator
from turns import commit, write_csv

import qtk
from qtk.quantizers.modes import caching

MODELS, QUICK_MODELS = ("vit_small_patch16_224", "resnet50"), ("resnet18",)
FLOAT, SIMULATED, TORCH, CALIBRATION = "float", "qtk simulation", "torch.fake_quantize_*", "compute_encodings"


def models(name: str, x: Tensor) -> tuple[qtk.QuantSim, dict[str, nn.Module]]:
    """The simulation and every way, on the device and in the dtype of ``x``."""
    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    sim = qtk.QuantSim(model, torch.randn(2, *x.shape[1:]))
    sim.model.to(x.device, x.dtype)
    sim.compute_encodings([x], progress=False)
    ways = {FLOAT: model.to(x.device, x.dtype), SIMULATED: sim.model, TORCH: with_torchs_operator(sim.model)}
    return sim, ways


@torch.no_grad()
def measure(name: str, x: Tensor, turns: int, *, compiled: bool) -> list[dict[str, object]]:
    """Rows of the table. Raises: SystemExit if the simulation quantizes nothing or is not finite."""
    sim, ways = models(name, x)
    expected, simulated = ways[FLOAT](x), sim.model(x)
    if torch.equal(simulated, expected) or not bool(torch.isfinite(simulated).all()):
        raise SystemExit(f"{name}: the simulation quantizes nothing, or is not finite; no speed is given")
    rows = []
    on_gpu = x.device.type == "cuda"
    with caching(sim.model):  # weights are quantized once, as in an evaluation
        eager: dict[str, Callable[[], object]] = {way: (lambda run=run: run(x)) for way, run in ways.items()}
        eager[CALIBRATION] = lambda: sim.compute_encodings([x], progress=False)
        rows += timed(name, "eager", eager, x, turns)
        if on_gpu:
            rows += timed(name, "CUDA graph", captured(ways, x), x, turns)
    if compiled:
        runs = {way: torch.compile(run) for way, run in ways.items()}
        rows += timed(name, "compiled", {way: (lambda run=run: run(x)) for way, run in runs.items()}, x, turns)
        if on_gpu:
            rows += timed(name, "compiled, CUDA graph", captured(runs, x), x, turns)
    return rows


def captured(ways: Mapping[str, Callable[[Tensor], object]], x: Tensor) -> dict[str, Callable[[], object]]:
    """Calls replayed as CUDA graphs; none by torch's operator, which waits for the GPU to check its zero points."""
    replayed: dict[str, Callable[[], object]] = {}
    for way in (FLOAT, SIMULATED):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                ways[way](x)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ways[way](x)
        replayed[way] = graph.replay
    return replayed


def timed(
    name: str, run: str, actions: Mapping[str, Callable[[], object]], x: Tensor, turns: int
) -> list[dict[str, object]]:
    taken: dict[str, list[float]] = {way: [] for way in actions}
    for action in actions.values():  # warm-up: compiles, and fills caches
        for _ in range(2):
            seconds(lambda action=action: action(), x.device.type)  # type: ignore[misc]
    for _ in tqdm(range(turns), desc=f"{name}, {run}", unit="turn", leave=False):
        for way, action in actions.items():
            taken[way].append(seconds(lambda action=action: action(), x.device.type))  # type: ignore[misc]
    return [
        {"model": name, "dtype": str(x.dtype).removeprefix("torch."), "batch": len(x), "run": run, "way": way,
         "median_ms": 1000 * statistics.median(own),
         "ratio": statistics.median(mine / base for mine, base in zip(own, taken[FLOAT], strict=True))}
        for way, own in taken.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", help="timm names")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="bfloat16 on a GPU, else float32")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--eager", action="store_true", help="nothing compiled")
    parser.add_argument("--quick", action="store_true", help="a small model and batch, few turns")
    parser.add_argument("--csv", type=Path, help="file to write")
    given = parser.parse_args()
    dtype = getattr(torch, given.dtype or ("bfloat16" if given.device == "cuda" else "float32"))
    size, turns = (2, 2) if given.quick else (given.batch_size, given.turns)
    rows: list[dict[str, object]] = []
    for name in given.models or (QUICK_MODELS if given.quick else MODELS):
        torch.compiler.reset()
        shape = timm.create_model(name).default_cfg["input_size"]
        x = torch.randn(size, *shape, device=given.device).to(dtype)
        rows += measure(name, x, turns, compiled=not given.eager)
    setting = {"commit": commit(), "torch": torch.__version__, "device": given.device,
               "threads": torch.get_num_threads(), "backend": qtk.backends()[given.device], "turns": turns}
    table = Table(title=", ".join(f"{key} {value}" for key, value in setting.items()))
    for heading in rows[0]:
        table.add_column(heading, justify="right" if heading in ("median_ms", "ratio") else "left")
    for row in rows:
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=140).print(table)
    if given.csv:
        write_csv(given.csv, setting, rows)


if __name__ == "__main__":
    main()
