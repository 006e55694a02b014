"""Times calibration with every scheme in multiples of the float model's forward over the same data.

Every weight and activation is observed and searched (W8A8, default target). The schemes, the original model's forward,
``prepare_model`` with ``QuantSim``, and the export of the first that torch.export makes with a free batch take turns in
one process; each figure is the median over the turns. No speed is given for a scheme unless every site got an
encoding. Weights are random: the time does not depend on them. ``forward past the sites`` is the floor of every scheme:
the float forward in operators with sites between them, where nothing reads the values.

    python benchmarks/calibration/bench_schemes.py --csv schemes.csv
    python benchmarks/calibration/bench_schemes.py --memory            # peak memory at 10 and at 1,000 batches
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import timm
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))

from turns import commit, write_csv

import qtk
from qtk.quantizers.modes import in_mode
from qtk.quantizers.quantizer import Mode

MODELS = ("vit_small_patch16_224", "resnet50")
SCHEMES = ("min_max", "moving_average", "percentile", "mse", "activation_mse", "entropy", "tf_enhanced")
ORIGINAL, EXPORT, PREPARE = "original fp32 forward", "torch.export.export", "prepare_model and QuantSim"
PAST_SITES = "forward past the sites"


def forward(model: nn.Module, batches: list[Tensor]) -> None:
    with torch.no_grad():
        for batch in batches:
            model(batch)


class Blind:
    """Stands at a site in place of an observer and reads nothing."""

    def observe(self, x: Tensor) -> None: ...


def forward_past_sites(sim: qtk.QuantSim, batches: list[Tensor]) -> None:
    quantizers = list(sim.quantizers.values())
    for quantizer in quantizers:
        quantizer.observer = Blind()
    with in_mode(quantizers, Mode.OBSERVE):
        forward(sim.model, batches)
    for quantizer in quantizers:
        quantizer.observer = None


def measure(
    name: str, schemes: list[str], num_batches: int, batch_size: int, repeats: int, progress: tqdm
) -> list[dict[str, object]]:
    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    batches = [torch.randn(batch_size, *model.default_cfg["input_size"]) for _ in range(num_batches)]
    prepared = qtk.prepare_model(model, batches[0])
    sims = {scheme: qtk.QuantSim(prepared, batches[0], scheme=scheme) for scheme in schemes}
    actions: dict[str, Callable[[], object]] = {ORIGINAL: lambda: forward(model, batches)}
    actions |= {
        scheme: lambda sim=sim: sim.compute_encodings(batches, progress=False) for scheme, sim in sims.items()
    }
    actions[PAST_SITES] = lambda: forward_past_sites(sims[schemes[0]], batches)
    free = ({0: torch.export.Dim.AUTO},)
    actions[EXPORT] = lambda: torch.export.export(model, (batches[0],), dynamic_shapes=free)
    actions[PREPARE] = lambda: qtk.QuantSim(qtk.prepare_model(model, batches[0]), batches[0])
    seconds: dict[str, list[float]] = {action: [] for action in actions}
    forward(model, batches[:1])
    for _ in range(repeats):
        for action, run in actions.items():
            progress.set_description(f"{name}: {action}")
            start = time.perf_counter()
            run()
            seconds[action].append(time.perf_counter() - start)
            progress.update()
    for scheme, sim in sims.items():
        if len(sim.encodings()) != len(sim.plan):
            raise SystemExit(f"{name}, {scheme}: sites without an encoding; no speed is given")
    rows = []
    for action, taken in seconds.items():
        ratios = [own / base for own, base in zip(taken, seconds[ORIGINAL], strict=True)]
        rows.append({"model": name, "action": action, "median_s": median(taken), "ratio": median(ratios),
                     "lowest": min(ratios), "highest": max(ratios), "sites": len(sims[schemes[0]].plan)})
    return rows


def peak_of(scheme: str, num_batches: int) -> int:
    """Peak memory in KiB of a subprocess that calibrates a small convolutional net."""
    done = subprocess.run(
        [sys.executable, __file__, "--peak", scheme, "--batches", str(num_batches)], check=True, capture_output=True,
        text=True,
    )
    return int(done.stdout.split()[-1])


def calibrate_and_print_peak(scheme: str, num_batches: int) -> None:
    torch.manual_seed(0)
    model = timm.create_model("resnet18").eval()
    shape = (4, 3, 96, 96)
    sim = qtk.QuantSim(model, torch.randn(shape), scheme=scheme)
    sim.compute_encodings((torch.randn(shape) for _ in range(num_batches)), progress=False)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def print_memory(schemes: list[str]) -> None:
    table = Table(title="peak memory of a whole calibration, resnet18 at 96 × 96, MiB")
    for heading in ("scheme", "10 batches", "1,000 batches", "growth", "beyond min_max"):
        table.add_column(heading, justify="left" if heading == "scheme" else "right")
    base = None
    for scheme in tqdm(schemes, unit="scheme"):
        few, many = peak_of(scheme, 10), peak_of(scheme, 1000)
        base = few if base is None else base
        table.add_row(scheme, f"{few / 1024:.0f}", f"{many / 1024:.0f}", f"{many / few - 1:+.1%}",
                      f"{(few - base) / 1024:+.0f}")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, help="timm names")
    parser.add_argument("--schemes", nargs="+", default=SCHEMES)
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--csv", type=Path, help="file to write")
    parser.add_argument("--memory", action="store_true", help="measure memory instead of time")
    parser.add_argument("--peak", metavar="SCHEME", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak:
        calibrate_and_print_peak(arguments.peak, arguments.batches)
        return
    if arguments.memory:
        print_memory(list(arguments.schemes))
        return
    rows: list[dict[str, object]] = []
    with tqdm(total=(len(arguments.schemes) + 4) * arguments.repeats * len(arguments.models), unit="run") as progress:
        for name in arguments.models:
            rows += measure(name, list(arguments.schemes), arguments.batches, arguments.batch_size, arguments.repeats,
                            progress)
    setting = {"commit": commit(), "torch": torch.__version__, "threads": torch.get_num_threads(),
               "batches": arguments.batches, "batch_size": arguments.batch_size, "repeats": arguments.repeats}
    table = Table(title=", ".join(f"{key} {value}" for key, value in setting.items()))
    for heading in ("model", "sites", "action", "median, s", "× fp32", "lowest", "highest"):
        table.add_column(heading, justify="left" if heading in ("model", "action") else "right")
    for row in rows:
        table.add_row(str(row["model"]), str(row["sites"]), str(row["action"]),
                      *(f"{row[key]:.2f}" for key in ("median_s", "ratio", "lowest", "highest")))
    Console(width=110).print(table)
    if arguments.csv:
        write_csv(arguments.csv, setting, rows)


if __name__ == "__main__":
    main()
