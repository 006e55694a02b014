"""How far fake-quantization is from moving the bytes it must, beside the ways others do it.

Each figure is a multiple of ``torch.Tensor.copy_`` of the same tensor, timed in the same turn; medians over the turns.
A forward reads and writes each element once, as the copy does; a backward reads two tensors and writes one, so that
its floor is 1.5 copies. ``clone`` is the copy with its allocation, which the others pay too. Nothing is timed that does
not first compute what the reference does: codes exactly where the definition is the same, within one step elsewhere.

    python benchmarks/kernels/bench_fake_quantize.py --csv kernels.csv        # on a GPU too, where there is one
    python benchmarks/kernels/bench_fake_quantize.py --device cpu --sizes 2.4 --threads 1
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))

from setting import commit, threads

import qtk
from qtk.numerics import affine
from qtk.ops.decomposed import FakeQuantize
from qtk.ops.fake_quantize import fake_quantize

MILLION = 1_000_000
WIDTH = 1536
SIZES = {"cpu": (0.00026, 0.016, 2.4, 64), "cuda": (0.016, 0.26, 2.4, 67, 268, 1074)}  # in million elements
KINDS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CODES = (-128, 127)
Quantize = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """One tensor and its scales."""

    device: str
    kind: str
    granularity: str
    elements: int

    def tensors(self) -> tuple[Tensor, Tensor]:
        width = min(WIDTH, self.elements)
        x = torch.randn(self.elements // width, width, device=self.device).to(KINDS[self.kind])
        count = {"tensor": (1,), "channel": (x.shape[0],), "channel_last": (width,), "block": (x.shape[0], width // 32)}
        return x, torch.rand(count[self.granularity], device=self.device) * 0.01 + 0.02

    @property
    def block_size(self) -> tuple[int, ...]:
        return {"tensor": (), "channel": (1, -1), "channel_last": (-1, 1), "block": (1, 32)}[self.granularity]


@dataclass(frozen=True)
class Figure:
    """Cost of one way of computing one case."""

    device: str
    kind: str
    granularity: str
    elements: int
    action: str
    way: str
    median_us: float
    copies: float
    share_of_bandwidth: float


def ways(case: Case) -> dict[str, Quantize]:
    """Who can compute this case without gradients of the range; all take (x, scale)."""
    spec = (case.block_size, *CODES)
    found: dict[str, Quantize] = {
        "qtk": lambda x, scale: fake_quantize(x, scale, None, *spec),
        "reference": lambda x, scale: affine.fake_quantize(x, scale, None, *spec),
        "compiled reference": torch.compile(lambda x, scale: FakeQuantize.apply(x, scale, None, *spec)),
    }
    if case.granularity == "tensor":
        zero = torch.zeros(1, dtype=torch.int32, device=case.device)
        found["torch builtin"] = lambda x, scale: torch.fake_quantize_per_tensor_affine(x, scale, zero, *CODES)
    elif case.granularity in ("channel", "channel_last"):
        axis = case.block_size.index(1)
        zeros = torch.zeros(1, dtype=torch.int32, device=case.device)
        found["torch builtin"] = lambda x, scale: torch.fake_quantize_per_channel_affine(
            x, scale, zeros.expand(scale.shape[0]).contiguous(), axis, *CODES
        )
    return found | aimet(case)


def aimet(case: Case) -> dict[str, Quantize]:
    """AIMET's quantize-dequantize, if it is installed."""
    try:
        from aimet_torch.v2.quantization.affine.backends import quantize_dequantize
    except ImportError:
        return {}
    shape = {"tensor": (), "channel": (-1, 1), "channel_last": (1, -1), "block": None}[case.granularity]
    block_size = (1, 32) if case.granularity == "block" else None

    def quantize(x: Tensor, scale: Tensor) -> Tensor:
        step = scale if shape is None else scale.reshape(shape)
        return quantize_dequantize(x, step, torch.zeros_like(step), *CODES, block_size=block_size)

    return {"AIMET": quantize}


def learned(case: Case) -> dict[str, Quantize]:
    """Who can train the range too."""
    found = ways(case)
    found.pop("reference")
    if "torch builtin" in found:
        zeros = torch.zeros(case.tensors()[1].shape, device=case.device)
        if case.granularity == "tensor":
            found["torch builtin"] = lambda x, scale: torch._fake_quantize_learnable_per_tensor_affine(
                x, scale, zeros, *CODES
            )
        else:
            axis = case.block_size.index(1)
            found["torch builtin"] = lambda x, scale: torch._fake_quantize_learnable_per_channel_affine(
                x, scale, zeros, axis, *CODES
            )
    return found


def prove(case: Case, way: str, quantize: Quantize) -> bool:
    """Whether this way computes the case; says so if not."""
    x, scale = case.tensors()
    expected = affine.fake_quantize(x, scale, None, case.block_size, *CODES)
    if not able(case, way, lambda: quantize(x, scale)):
        return False
    off = (quantize(x, scale).float() - expected.float()).abs()
    # a tie may go another way at others, and half precision be computed in half precision
    bound = 0.0 if way == "qtk" else float(scale.max()) * (1.01 if case.kind == "float32" else 2)
    if float(off.max()) > bound:
        tqdm.write(f"{way} is off by {float(off.max()):g} on {case}; not timed")
        return False
    return True


def forward_actions(case: Case) -> dict[str, Callable[[], object]]:
    x, scale = case.tensors()
    with torch.no_grad():
        proved = {way: quantize for way, quantize in ways(case).items() if prove(case, way, quantize)}
    return {way: (lambda quantize=quantize: quantize(x, scale)) for way, quantize in proved.items()}


def training_actions(case: Case) -> dict[str, Callable[[], object]]:
    x, scale = case.tensors()
    x.requires_grad_()
    scale.requires_grad_()
    grad = torch.randn_like(x)

    def step(quantize: Quantize) -> Callable[[], object]:
        return lambda: torch.autograd.grad(quantize(x, scale), (x, scale), grad)

    steps = {way: step(quantize) for way, quantize in learned(case).items() if prove(case, way, quantize)}
    return {way: run for way, run in steps.items() if able(case, way, run)}


def able(case: Case, way: str, run: Callable[[], object]) -> bool:
    """Whether this way runs at all; says so if not."""
    try:
        run()
    except (RuntimeError, NotImplementedError, TypeError) as error:
        tqdm.write(f"{way} cannot compute {case}: {str(error).splitlines()[0]}")
        return False
    return True


def measure(case: Case, *, repeats: int, progress: tqdm) -> list[Figure]:
    torch.compiler.reset()
    x, _ = case.tensors()
    into = torch.empty_like(x)
    figures = []
    for action, bytes_moved, actions in (("forward", 2, forward_actions), ("forward + backward", 5, training_actions)):
        with torch.set_grad_enabled(action != "forward"):
            floors = {"copy_": lambda: into.copy_(x), "clone": lambda: x.clone()}
            seconds = turns({**floors, **actions(case)}, repeats, case.device)
        for way, taken in seconds.items():
            copies = statistics.median(mine / base for mine, base in zip(taken, seconds["copy_"], strict=True))
            share = 1 / copies if way in ("copy_", "clone") else bytes_moved / 2 / copies
            figures.append(Figure(**asdict(case), action=action, way=way, median_us=statistics.median(taken) * 1e6,
                                  copies=copies, share_of_bandwidth=share))
        progress.update()
    return figures


def turns(actions: dict[str, Callable[[], object]], repeats: int, device: str) -> dict[str, list[float]]:
    """Seconds of each action, one entry a turn; short ones run many times a turn."""
    loops = {}
    for way, run in actions.items():
        for _ in range(3):
            run()
        loops[way] = max(1, int(0.02 / max(timed(run, 3, device), 1e-7)))
    taken: dict[str, list[float]] = {way: [] for way in actions}
    for _ in range(repeats):
        for way, run in actions.items():
            taken[way].append(timed(run, loops[way], device))
    return taken


def timed(run: Callable[[], object], loops: int, device: str) -> float:
    """Seconds a call."""
    if device == "cpu":
        start = time.perf_counter()
        for _ in range(loops):
            run()
        return (time.perf_counter() - start) / loops
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(loops):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / loops / 1000


def show(figures: list[Figure]) -> None:
    table = Table(title="multiples of copy_")
    for name in ("device", "dtype", "granularity", "M elements", "action", "way"):
        table.add_column(name)
    for name in ("µs", "× copy_", "of bandwidth"):
        table.add_column(name, justify="right")
    for figure, following in zip(figures, [*figures[1:], None], strict=True):
        table.add_row(
            figure.device, figure.kind, figure.granularity, f"{figure.elements / MILLION:.4g}", figure.action,
            figure.way, f"{figure.median_us:.1f}", f"{figure.copies:.2f}", f"{100 * figure.share_of_bandwidth:.0f} %",
            end_section=following is None or following.action != figure.action,
        )
    Console(width=130).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["float32", "bfloat16"])
    parser.add_argument("--granularities", nargs="+", default=["tensor", "channel", "channel_last", "block"])
    parser.add_argument("--sizes", nargs="+", type=float, help="million elements")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=threads, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="one size, float32")
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    sizes = arguments.sizes or ((2.4,) if arguments.quick else SIZES[arguments.device])
    kinds = ["float32"] if arguments.quick else arguments.kinds
    cases = [
        Case(arguments.device, kind, granularity, max(1, int(size * MILLION / WIDTH)) * WIDTH if size > 0.01 else 256)
        for size in sizes for kind in kinds for granularity in arguments.granularities
    ]
    figures: list[Figure] = []
    with tqdm(total=2 * len(cases), unit="case") as progress:
        for case in cases:
            progress.set_description(f"{case.kind} per {case.granularity}, {case.elements / MILLION:.4g} M")
            figures += measure(case, repeats=arguments.repeats, progress=progress)
    show(figures)
    setting = {"commit": commit(), "torch": torch.__version__, "threads": torch.get_num_threads(),
               "backend": qtk.backends()[arguments.device]}
    print(", ".join(f"{key} {value}" for key, value in setting.items()))
    if arguments.csv:
        with arguments.csv.open("w", newline="", encoding="utf-8") as file:
            rows = [{**setting, **asdict(figure)} for figure in figures]
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
