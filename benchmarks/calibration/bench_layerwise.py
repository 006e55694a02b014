"""Times layer-wise methods in multiples of the float model's forward over the same data, and compares output errors.

Weights alone are quantized, to 4 bit. Every way and the float forward take turns in one process; each figure is the
median over the turns, in seconds of CPU time (on a GPU in seconds), the forward's that of a turn over its ways: run it
with one thread. Errors are those over the calibration data and over as much data of the same kind that no method has
seen. *Direct* forms every output for every candidate, as other toolkits do; AIMET is measured if it is installed. The
error of SeqMSE must not be above that of the full search over all candidates (*exact*), or no speed is given.

    OMP_NUM_THREADS=1 python benchmarks/calibration/bench_layerwise.py --csv layerwise.csv
    python benchmarks/calibration/bench_layerwise.py --memory
"""

from __future__ import annotations

import argparse
import importlib.util
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import ClassVar

import timm
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))

from turns import commit, write_csv

import qtk
from qtk.core.spec import QuantSpec
from qtk.layerwise.layer_state import LayerState
from qtk.moments.required_statistics import RequiredStatistics

CANDIDATES = 20
GRANULARITIES = ("per_channel", "128", "64")
FLOAT = "original fp32 forward"
JOINT, EXACT = "SeqMSE, joint", "SeqMSE, exact"
Search = Callable[[nn.Module, list[Tensor], str], nn.Module]
"""(float model, data, granularity) → a model with quantized weights."""


class Mlp(nn.Module):
    """The second half of a transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(nn.functional.gelu(self.fc1(self.norm(x))))


def mlp_blocks() -> tuple[nn.Module, tuple[int, ...]]:
    return nn.Sequential(*(Mlp(512) for _ in range(3))).eval(), (8, 197, 512)


def vit() -> tuple[nn.Module, tuple[int, ...]]:
    return timm.create_model("vit_small_patch16_224").eval(), (8, 3, 224, 224)


def clock(batches: list[Tensor]) -> float:
    """Seconds of CPU time, or on a GPU seconds, once it has done what it was given."""
    if not batches[0].is_cuda:
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def workload(name: str, device: str = "cpu") -> tuple[nn.Module, list[Tensor], list[Tensor]]:
    """The model, its calibration data, and as much more of the same kind that no method sees."""
    torch.manual_seed(0)
    model, shape = WORKLOADS[name]()
    data = [torch.randn(shape).to(device) for _ in range(8)]
    return model.to(device), data[:4], data[4:]


WORKLOADS = {"3 MLP blocks": mlp_blocks, "vit_small": vit}


def sim_of(model: nn.Module, batches: list[Tensor], granularity: str) -> qtk.QuantSim:
    config: dict[str, object] = {
        "version": 1, "defaults": {"weight": {"symmetric": True, "granularity": "per_channel"},
                                   "activation": {"symmetric": False}, "bias": "float"},
    }
    if granularity != "per_channel":
        blocks = {"granularity": "per_block", "block_size": int(granularity)}
        config["rules"] = [{"match": {"op": "linear"}, "weight": blocks}]
    sim = qtk.QuantSim(model, batches[0], weight_bits=4, activation_bits=None, config=config)
    sim.compute_encodings(None, progress=False)
    return sim


@dataclass(frozen=True)
class WalkAlone:
    """A layer-wise method that collects the Gram matrices and changes nothing."""

    needs_bias: ClassVar[bool] = False
    searches_scale: ClassVar[bool] = False

    def min_rows(self, columns: int) -> int:
        return 0

    def refuses(self, spec: QuantSpec) -> str | None:
        return None

    def required_statistics(self, block: int | None) -> RequiredStatistics:
        return RequiredStatistics()

    def apply(self, state: LayerState) -> LayerState:
        return state


def layerwise(*methods: object, **settings: object) -> Search:
    def search(model: nn.Module, batches: list[Tensor], granularity: str) -> nn.Module:
        sim = sim_of(model, batches, granularity)
        start = clock(batches)
        options = qtk.LayerwiseOptions(**settings)
        qtk.apply_layerwise(sim, batches, list(methods), progress=False, options=options)
        search.seconds = clock(batches) - start
        return sim.model

    return search


def direct(model: nn.Module, batches: list[Tensor], granularity: str) -> nn.Module:
    """Computes every output for every candidate, with one forward up to each layer for its inputs."""
    sim = sim_of(model, batches, granularity)
    start = clock(batches)
    with torch.no_grad():
        for name, module in model.named_modules():
            if not isinstance(module, nn.Linear):
                continue
            quantizer, weight = sim.quantizers[f"{name}.weight"], module.weight
            present = quantizer.encoding
            shape = present.scale.reshape(len(weight), -1).shape
            inputs = inputs_of(model, module, batches)
            parts = [x.reshape(-1, shape[1], x.shape[-1] // shape[1]).transpose(0, 1) for x in inputs]
            original = weight.reshape(len(weight), shape[1], -1).permute(1, 2, 0)
            errors = []
            for index in range(1, CANDIDATES + 1):
                scale = present.scale * (index / CANDIDATES)
                step = scale.reshape(*shape, 1)
                near = (weight.reshape(*shape, -1) / step).round().clamp(-8, 7) * step
                near = near.permute(1, 2, 0)
                errors.append(sum((x @ original - x @ near).square().sum(1).T for x in parts))
            best = torch.stack(errors).min(0).indices + 1
            scale = present.scale * (best.reshape(present.scale.shape) / CANDIDATES)
            quantizer.load_encoding(qtk.Encoding(present.spec, scale.float()))
    direct.seconds = clock(batches) - start
    return sim.model


def inputs_of(model: nn.Module, module: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    seen: list[Tensor] = []

    def stop(own: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.append(args[0])
        raise InterruptedError

    handle = module.register_forward_pre_hook(stop)
    for batch in batches:
        try:
            model(batch)
        except InterruptedError:
            continue
    handle.remove()
    return seen


def aimet(model: nn.Module, batches: list[Tensor], granularity: str) -> nn.Module:
    """AIMET's own, with its defaults; activations are not quantized in its search either."""
    import aimet_torch
    from aimet_torch.seq_mse import apply_seq_mse
    from aimet_torch.v2.quantsim.config_utils import set_blockwise_quantization_for_weights

    sim = aimet_torch.QuantizationSimModel(model, batches[0], default_param_bw=4, default_output_bw=16)
    for _, module in sim.named_qmodules():
        for index, quantizer in enumerate(module.output_quantizers):
            module.output_quantizers[index] = None if quantizer is not None else quantizer
        for index, quantizer in enumerate(module.input_quantizers):
            module.input_quantizers[index] = None if quantizer is not None else quantizer
    if granularity != "per_channel":
        set_blockwise_quantization_for_weights(sim, [nn.Linear], 4, symmetric=True, block_size=int(granularity))
    start = clock(batches)
    apply_seq_mse(sim, batches, num_candidates=CANDIDATES)
    aimet.seconds = clock(batches) - start
    return sim.model


WAYS: dict[str, Search] = {
    "walk alone": layerwise(WalkAlone()),
    "SeqMSE": layerwise("seq_mse"),
    "SeqMSE, one path (symqt)": layerwise("seq_mse", inputs="symqt"),
    "SeqMSE, refined": layerwise("seq_mse(refine=True)"),
    JOINT: layerwise("seq_mse(joint=True)"),
    EXACT: layerwise("seq_mse(exact=True)"),
    "GPTQ": layerwise("gptq"),
    "GPTQ, nothing held out": layerwise("gptq", holdout=0),
    "SeqMSE + GPTQ": layerwise("seq_mse", "gptq"),
    "coordinate descent": layerwise("coordinate_descent"),
    "coordinate descent, nothing held out": layerwise("coordinate_descent", holdout=0),
    "SeqMSE + coordinate descent": layerwise("seq_mse", "coordinate_descent"),
    "AdaRound": layerwise("adaround"),
    "SeqMSE + AdaRound": layerwise("seq_mse", "adaround"),
    "direct": direct,
    **({"AIMET": aimet} if importlib.util.find_spec("aimet_torch") else {}),
}


def measure(
    name: str, granularity: str, repeats: int, ways: list[str], progress: tqdm, device: str
) -> list[dict[str, object]]:
    model, batches, unseen = workload(name, device)
    with torch.no_grad():
        model(batches[0])  # loads what the device needs
    tried = [way for way in ways if way != JOINT or granularity != "per_channel"]
    seconds: dict[str, list[float]] = {FLOAT: [], **{way: [] for way in tried}}
    errors: dict[str, tuple[float, ...]] = {}
    for _ in range(repeats):
        forwards = []
        for way in tried:
            progress.set_description(f"{name}, {granularity}: {way}")
            forwards.append(seconds_of_forward(model, batches))
            simulated = WAYS[way](model, batches, granularity)
            seconds[way].append(WAYS[way].seconds)
            errors[way] = tuple(error(simulated, model, data) for data in (batches, unseen))
            progress.update()
        seconds[FLOAT].append(median(forwards))
    if EXACT in errors and "SeqMSE" in errors and errors["SeqMSE"][0] > errors[EXACT][0] * (1 + 1e-3):
        raise SystemExit(f"{name}, {granularity}: the error is above that of the full search; no speed is given")
    base = seconds[FLOAT]
    return [
        {"model": name, "granularity": granularity, "way": way, "median_s": median(taken),
         "ratio": median(own / floor for own, floor in zip(taken, base, strict=True)),
         **dict(zip(("error", "error_unseen"), errors.get(way, (None, None)), strict=True))}
        for way, taken in seconds.items()
    ]


@torch.no_grad()
def seconds_of_forward(model: nn.Module, batches: list[Tensor]) -> float:
    start = clock(batches)
    for batch in batches:
        model(batch)
    return clock(batches) - start


@torch.no_grad()
def error(simulated: nn.Module, model: nn.Module, batches: list[Tensor]) -> float:
    """Squared error of the output, in parts of its power."""
    lost = signal = 0.0
    for batch in batches:
        output = model(batch)
        lost, signal = lost + float((simulated(batch) - output).square().sum()), signal + float(output.square().sum())
    return lost / signal


def print_memory() -> None:
    table = Table(title="peak memory of a process, MiB")
    ways = (FLOAT, "SeqMSE", "SeqMSE, one path (symqt)", "GPTQ", "SeqMSE + GPTQ", "coordinate descent", "AdaRound")
    for heading in ("model", "granularity", *ways):
        table.add_column(heading, justify="left" if heading in ("model", "granularity") else "right")
    for name in WORKLOADS:
        for granularity in GRANULARITIES:
            found = []
            for way in ways:
                command = [sys.executable, __file__, "--peak", name, granularity, way]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                found.append(f"{int(done.stdout.split()[-1]) / 1024:.0f}")
            table.add_row(name, granularity, *found)
    Console().print(table)


def print_peak(name: str, granularity: str, way: str) -> None:
    model, batches, _ = workload(name)
    if way == FLOAT:
        sim_of(model, batches, granularity)
        with torch.no_grad():
            for batch in batches:
                model(batch)
    else:
        WAYS[way](model, batches, granularity)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--granularities", nargs="+", default=list(GRANULARITIES))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--csv", type=Path, help="file to write")
    parser.add_argument("--memory", action="store_true", help="measure memory instead of time")
    parser.add_argument("--peak", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak:
        print_peak(*arguments.peak)
        return
    if arguments.memory:
        print_memory()
        return
    rows: list[dict[str, object]] = []
    total = len(arguments.models) * len(arguments.granularities) * len(arguments.ways) * arguments.repeats
    with tqdm(total=total, unit="run") as progress:
        for name in arguments.models:
            for granularity in arguments.granularities:
                rows += measure(name, granularity, arguments.repeats, list(arguments.ways), progress, arguments.device)
    setting = {"commit": commit(), "torch": torch.__version__, "threads": torch.get_num_threads(),
               "device": arguments.device, "repeats": arguments.repeats}
    table = Table(title=", ".join(f"{key} {value}" for key, value in setting.items()))
    for heading in ("model", "granularity", "way", "median s", "× fp32", "error / signal", "unseen data"):
        table.add_column(heading, justify="left" if heading in ("model", "granularity", "way") else "right")
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        last = following is None or following["granularity"] != row["granularity"]
        shown = ["" if row[key] is None else f"{row[key]:.6f}" for key in ("error", "error_unseen")]
        table.add_row(str(row["model"]), str(row["granularity"]), str(row["way"]), f"{row['median_s']:.2f}",
                      f"{row['ratio']:.2f}", *shown, end_section=last)
    Console(width=110).print(table)
    if arguments.csv:
        write_csv(arguments.csv, setting, rows)


if __name__ == "__main__":
    main()
