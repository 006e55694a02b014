"""Counts what calibrations and layer-wise methods multiply and move, and divides it by the machine's own speed.

Every operator that runs is counted: of products, solves and factorizations the floating-point operations, of all
others the bytes of their tensors. The floor is the operations at the rate of a product of square matrices plus the
bytes at the rate of ``copy_``, both measured here, in multiples of the float forward's time. *× fp32* is the time of
runs without counting; *products* and *passes* are the times of the two kinds of operators in the counted run.

    OMP_NUM_THREADS=1 python benchmarks/calibration/floors.py --csv floors.csv
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from statistics import median

import timm
import torch
from bench_layerwise import FLOAT, sim_of, workload
from bench_schemes import EXPORT, PREPARE, forward
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[1]))

from turns import commit, write_csv

import qtk

SCHEMES = ("min_max", "percentile", "mse", "tf_enhanced")
METHODS = ("seq_mse", "gptq", "coordinate_descent", "adaround")
UNFOLDED = {"version": 1, "extends": "default", "fold_batch_norms": "at_export"}
Action = Callable[[], object]


def operations(name: str, args: list[Tensor], result: Tensor) -> float | None:
    """Floating-point operations of a product, a solve or a factorization; None of other operators."""
    if "convolution_backward" in name:
        return 4.0 * args[0].numel() * prod(args[2].shape[1:])
    if "convolution" in name:
        return 2.0 * result.numel() * prod(args[1].shape[1:])
    if "addmm" in name or "baddbmm" in name:
        return 2.0 * result.numel() * args[1].shape[-1]
    if name in ("mm", "bmm"):
        return 2.0 * result.numel() * args[0].shape[-1]
    if "scaled_dot_product" in name:
        return 4.0 * args[0].numel() * args[1].shape[-2]
    if "solve_triangular" in name:
        return 1.0 * result.numel() * args[0].shape[-1]
    if "cholesky" in name:
        return args[0].numel() * args[0].shape[-1] / 3
    return None


@dataclass
class Counted:
    """Of one kind: seconds, and operations or bytes."""

    seconds: float = 0.0
    amount: float = 0.0


@dataclass(eq=False)
class Counting(TorchDispatchMode):
    """Counts the operators that run within; ``passes`` by operator."""

    products: Counted = field(default_factory=Counted)
    passes: dict[str, Counted] = field(default_factory=lambda: defaultdict(Counted))

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self, operator: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> object:
        start = time.perf_counter()
        result = operator(*args, **(kwargs or {}))
        seconds = time.perf_counter() - start
        given = [each for each in args if isinstance(each, Tensor)]
        made = [each for each in (result if isinstance(result, tuple) else (result,)) if isinstance(each, Tensor)]
        name = operator.overloadpacket.__name__
        if not all(map(_holds_values, given + made)):
            return result
        work = operations(name, given, made[0]) if made else None
        counted = self.products if work is not None else self.passes[name]
        counted.seconds += seconds
        if work is not None:
            counted.amount += work
        elif not _is_view(name, given, made):
            counted.amount += sum(map(_moved, given + made))
        return result

    @property
    def moved(self) -> Counted:
        every = self.passes.values()
        return Counted(sum(each.seconds for each in every), sum(each.amount for each in every))


def _holds_values(tensor: Tensor) -> bool:
    """Not so of the tensors that torch.export traces with."""
    return type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta


def _moved(tensor: Tensor) -> int:
    """Bytes, those of an expanded tensor once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _is_view(name: str, given: list[Tensor], made: list[Tensor]) -> bool:
    own = {each.untyped_storage().data_ptr() for each in given}
    return not name.endswith("_") and all(each.untyped_storage().data_ptr() in own for each in made)


def speed_of_products() -> float:
    """Floating-point operations per second of a product of square matrices."""
    matrix = torch.randn(1536, 1536)
    return 2.0 * 1536**3 / _fastest(lambda: matrix @ matrix)


def speed_of_copies() -> float:
    """Bytes per second, read and written, of ``copy_`` of 16 MiB."""
    values = torch.randn(4 * 2**20)
    into = torch.empty_like(values)
    return 2.0 * 4 * values.numel() / _fastest(lambda: into.copy_(values))


def _fastest(action: Action) -> float:
    taken = []
    for _ in range(9):
        start = time.perf_counter()
        action()
        taken.append(time.perf_counter() - start)
    return min(taken)


def of_calibration(name: str) -> tuple[Action, dict[str, Callable[[], Action]]]:
    """The float forward over eight batches of four, and how each other action over them begins."""
    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    batches = [torch.randn(4, *model.default_cfg["input_size"]) for _ in range(8)]
    prepared = qtk.prepare_model(model, batches[0])
    sims = {scheme: qtk.QuantSim(prepared, batches[0], scheme=scheme) for scheme in SCHEMES}

    def calibration(sim: qtk.QuantSim) -> Action:
        return lambda: sim.compute_encodings(batches, progress=False)

    actions = {scheme: lambda sim=sim: calibration(sim) for scheme, sim in sims.items()}
    simulated = qtk.QuantSim(prepared, batches[0])
    simulated.compute_encodings(batches[:1], progress=False)
    actions["simulated forward"] = lambda: lambda: forward(simulated.model, batches)
    actions["original training step"] = lambda: lambda: train(model, batches)
    actions["simulated training step"] = lambda: lambda: train(simulated.model, batches)
    if any(isinstance(module, nn.BatchNorm2d) for module in model.modules()):
        original = copy.deepcopy(model).train()
        live = qtk.QuantSim(model, batches[0], config=UNFOLDED)
        live.compute_encodings(batches[:1], progress=False)
        live.model.train()
        actions["original training step, train mode"] = lambda: lambda: train(original, batches)
        actions["simulated training step, live batch norms"] = lambda: lambda: train(live.model, batches)
    free = ({0: torch.export.Dim.AUTO},)
    actions[EXPORT] = lambda: lambda: torch.export.export(model, (batches[0],), dynamic_shapes=free)
    actions[PREPARE] = lambda: lambda: qtk.QuantSim(qtk.prepare_model(model, batches[0]), batches[0])
    return lambda: forward(model, batches), actions


def train(model: nn.Module, batches: list[Tensor]) -> None:
    """Forward and backward of each batch."""
    for batch in batches:
        model.zero_grad()
        model(batch).sum().backward()
    model.zero_grad()


def of_layerwise(name: str) -> tuple[Action, dict[str, Callable[[], Action]]]:
    """The float forward over the calibration data, and each method with int4 weights in blocks of 128."""
    model, batches, _ = workload(name)

    def begin(method: str) -> Action:
        sim = sim_of(model, batches, "128")
        return lambda: qtk.apply_layerwise(sim, batches, [method], progress=False)

    return lambda: forward(model, batches), {method: lambda method=method: begin(method) for method in METHODS}


WORKLOADS = {"3 MLP blocks": of_layerwise, "vit_small_patch16_224": of_calibration, "resnet50": of_calibration}


def measure(name: str, repeats: int) -> list[dict[str, object]]:
    base, actions = WORKLOADS[name](name)
    begun = {FLOAT: lambda: base, **actions}
    taken: dict[str, list[float]] = {action: [] for action in begun}
    base()
    for _ in range(repeats):
        for action, begin in begun.items():
            run = begin()
            start = time.process_time()
            run()
            taken[action].append(time.process_time() - start)
    counted = {}
    for action, begin in begun.items():
        run = begin()
        with Counting() as counted[action]:
            run()
    products, copies = speed_of_products(), speed_of_copies()
    of_forward, multiplied = median(taken[FLOAT]), counted[FLOAT].products.amount
    rows = []
    for action, count in counted.items():
        moved = count.moved
        floor = count.products.amount / products + moved.amount / copies
        largest = sorted(count.passes.items(), key=lambda each: -each[1].seconds)[:4]
        rows.append({
            "model": name, "action": action, "ratio": median(taken[action]) / of_forward, "floor": floor / of_forward,
            "multiplications": count.products.amount / multiplied, "megabytes": moved.amount / 1e6,
            "of_bytes": moved.amount / copies / of_forward, "products": count.products.seconds / of_forward,
            "passes": moved.seconds / of_forward,
            "largest": ", ".join(f"{operator} {each.seconds / of_forward:.2f}" for operator, each in largest),
        })
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--csv", type=Path, help="file to write")
    arguments = parser.parse_args()
    rows = [row for name in arguments.models for row in measure(name, arguments.repeats)]
    setting = {"commit": commit(), "torch": torch.__version__, "threads": torch.get_num_threads(),
               "repeats": arguments.repeats}
    table = Table(title=", ".join(f"{key} {value}" for key, value in setting.items()))
    shown = {"ratio": "× fp32", "floor": "floor", "multiplications": "operations, × fp32", "megabytes": "MB",
             "of_bytes": "their floor", "products": "products", "passes": "passes"}
    for heading in ("model", "action", *shown.values(), "largest passes"):
        table.add_column(heading, justify="right" if heading in shown.values() else "left")
    for row in rows:
        figures = (f"{row[key]:.0f}" if key == "megabytes" else f"{row[key]:.2f}" for key in shown)
        table.add_row(str(row["model"]), str(row["action"]), *figures, str(row["largest"]))
    Console(width=190).print(table)
    if arguments.csv:
        write_csv(arguments.csv, setting, rows)


if __name__ == "__main__":
    main()
