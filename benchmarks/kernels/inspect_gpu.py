"""Compiles the GPU kernels for chips that need not be here, and prints what the compiled code does.

For every kernel, dtype, granularity and chip: launches a call; registers a thread, bytes spilled, and the instructions
of a turn of the main loop that store or load these (must be 0); shared memory; occupancy (the share of the resident
warps that registers and shared memory leave room for); instructions that load or store 128 bits, and less; true
divisions in a turn of a thread, which has 8 or 16 elements; atomics; machine instructions an element
(``machine_code``, ``gpu_code``), all and those that the chip's issue rate counts.

The roofline of 64 million elements, in µs, is a floor and an estimate, not a measurement: the longer of ``memory_us``,
the bytes of the kernel's streams over the chip's bandwidth, and ``issue_us``, the counted instructions over its issue
rate; ``bound`` says which. It assumes that

- memory runs at the data sheet's bandwidth, and every stream is read or written once; what several programs read
  again (all candidates of a range) comes from a cache at no cost;
- every scheduler issues an instruction each cycle at the highest clock, so that latency is hidden altogether. Units
  that take fewer are no limit: reciprocals (a warp in 8 cycles of one scheduler on NVIDIA, a wave in 4 issue slots on
  AMD), conversions, 64-bit integers, and on an A100 float32 (a warp in 2 cycles);
- an instruction takes its slot if its predicate is off, too; branches on AMD skip nothing; atomics meet no conflict;
- what is before and after a loop costs nothing, and the share of idle lanes is that of the shape inspected.

GPTQ's kernel (``round_with_feedback``) goes column by column, in float32, and strides over its scales whatever their
granularity: one row of the table, without a count of instructions.

``measured_us`` is what ``measure_gpu.py`` has measured on that chip for so many elements, if it has
(``results/kernels_gpu.csv``); of a learned backward, forward + backward less forward.

    python benchmarks/kernels/inspect_gpu.py
    python benchmarks/kernels/inspect_gpu.py --chips sm_90 --kinds float32 --shapes 4095x1023 4096x197 --json code.json
"""

from __future__ import annotations

import argparse
import csv
import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from gpu_code import CHIPS, Chip, compiled, recorded
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm import tqdm

from qtk.core.dtypes import DTYPES, FloatDtype
from qtk.kernels.gpu import (
    candidate_errors,
    fake_quantize,
    fake_quantize_dynamic,
    feedback_rounding,
    statistics,
)
from qtk.kernels.gpu import extremes as extremes_kernels

SHAPE = 4096, 1024
MICROSECONDS = 1e6
ELEMENTS = 64 << 20
BLOCKS = {
    "tensor": (), "row": (1, -1), "last_axis": (-1, 1), "block16": (1, 16), "block32": (1, 32), "block64": (1, 64),
    "block128": (1, 128),
}
MEASURED = Path(__file__).parents[1] / "results" / "kernels_gpu.csv"
MEASURED_AS = {"tensor": "tensor", "row": "channel", "last_axis": "channel_last", "block32": "block"}
"""Granularities as ``bench_fake_quantize.py`` calls them."""
KINDS = ("float32", "bfloat16", "float16")
CODES = -128, 127
FORMAT = DTYPES["fp8_e4m3"]
assert isinstance(FORMAT, FloatDtype)
NUMBERS = FORMAT.exponent_bits, FORMAT.mantissa_bits, FORMAT.largest


@dataclass(frozen=True, slots=True)
class Given:
    """The arguments of one call."""

    x: Tensor
    granularity: str

    @property
    def blocks(self) -> tuple[int, ...]:
        return BLOCKS[self.granularity]

    @property
    def scale(self) -> Tensor:
        rows, columns = self.x.shape
        counts = {"tensor": (1,), "row": (rows,), "last_axis": (columns,)}
        return torch.ones(counts.get(self.granularity, (rows, columns // max(self.blocks, default=1))))


def forward(given: Given) -> None:
    fake_quantize.fake_quantize(given.x, given.scale, given.scale, given.blocks, *CODES)


def backward(given: Given) -> None:
    fake_quantize.fake_quantize_backward(given.x, given.x, given.scale, given.scale, given.blocks, *CODES, False, False)


def learned_backward(given: Given) -> None:
    fake_quantize.fake_quantize_backward(given.x, given.x, given.scale, given.scale, given.blocks, *CODES, True, True)


def residual(given: Given) -> None:
    fake_quantize.fake_quantize_with_residual(given.x, given.scale, None, given.blocks, *CODES, True)


def residual_backward(given: Given) -> None:
    kept = torch.ones_like(given.x, dtype=torch.int8)
    fake_quantize.fake_quantize_residual_backward(
        given.x, kept, given.scale, None, given.blocks, *CODES, False, False)


def residual_learned_backward(given: Given) -> None:
    kept = torch.ones_like(given.x, dtype=torch.int16)
    fake_quantize.fake_quantize_residual_backward(
        given.x, kept, given.scale, given.scale, given.blocks, *CODES, True, True)


def minifloat(given: Given) -> None:
    fake_quantize.fake_quantize_float(given.x, given.scale, given.blocks, *NUMBERS)


def minifloat_backward(given: Given) -> None:
    fake_quantize.fake_quantize_float_backward(given.x, given.x, given.scale, given.blocks, *NUMBERS, True)


def dynamic(given: Given) -> None:
    fake_quantize_dynamic.fake_quantize_dynamic(given.x, given.blocks, 0, 255, False)


def min_max(given: Given) -> None:
    statistics.min_max(given.x, given.blocks, given.scale.numel())


def extremes(given: Given) -> None:
    ends = given.scale.reshape(-1)
    extremes_kernels.add_extremes_(given.x, given.blocks, -1e30, 0, ends, ends, torch.zeros(3, dtype=torch.int64))


def histogram(given: Given) -> None:
    flat = given.scale.reshape(-1)
    statistics.histogram(given.x, flat, torch.zeros_like(flat, dtype=torch.int32), 1023, given.blocks)


def round_with_feedback(given: Given) -> None:
    target = given.x[None, :, :128].contiguous()
    columns = target.shape[2]
    scale = torch.ones(1, len(given.x), 1).expand(target.shape)
    feedback_rounding.round_with_feedback_(
        target, target.clone(), torch.ones(1, columns, columns), scale, None, *CODES, backwards=False)


def errors(given: Given) -> None:
    scales = given.scale.reshape(1, -1).expand(20, -1).contiguous()
    candidate_errors.candidate_errors(given.x, scales, None, given.blocks, *CODES, True, None, 1.0)


CALLS: dict[str, Callable[[Given], None]] = {
    "forward": forward, "backward": backward, "backward, learned": learned_backward, "with residual": residual,
    "residual, backward": residual_backward, "residual, backward, learned": residual_learned_backward,
    "minifloat": minifloat, "minifloat, backward, learned": minifloat_backward, "dynamic": dynamic,
    "min_max": min_max, "extremes": extremes, "histogram": histogram, "candidate_errors": errors,
    "round_with_feedback": round_with_feedback,
}
ONLY = {"round_with_feedback": ("float32", "row")}
"""Calls that are compiled for one dtype and granularity."""


def rows(
    chips: list[str], kinds: list[str], granularities: list[str], calls: list[str], shapes: list[tuple[int, int]]
) -> Iterator[dict[str, object]]:
    cases = itertools.product(chips, calls, kinds, granularities, shapes)
    for chip, name, kind, granularity, shape in tqdm(list(cases), unit="case"):
        has_blocks = shape[1] % max(BLOCKS[granularity], default=1) == 0
        if has_blocks and ONLY.get(name, (kind, granularity)) == (kind, granularity):
            yield from inspected(CHIPS[chip], name, getattr(torch, kind), granularity, shape)


def inspected(
    chip: Chip, name: str, kind: torch.dtype, granularity: str, shape: tuple[int, int]
) -> Iterator[dict[str, object]]:
    with recorded(chip) as launches:
        CALLS[name](Given(torch.ones(shape, dtype=kind), granularity))
    for launch in launches:
        code = compiled(launch, chip)
        size = launch.bits / 8
        memory = size * ELEMENTS / (chip.bandwidth * 1e12) * MICROSECONDS
        issue = None if code.issues is None else code.issues * ELEMENTS / (chip.issues * 1e12) * MICROSECONDS
        yield {
            "chip": f"{chip.target.arch} {chip.name}", "call": name, "kernel": launch.kernel.__name__,
            "kind": str(kind).removeprefix("torch."), "granularity": granularity, "rows": shape[0],
            "columns": shape[1], "launches": len(launches), **asdict(code), "bytes": size,
            "memory_us": memory, "issue_us": issue, "roofline_us": max(memory, issue or 0.0),
            "bound": None if issue is None else "memory" if memory >= issue else "instructions",
            "measured_us": measured_us(MEASURED, chip.name, name, str(kind).removeprefix("torch."), granularity),
        }


def measured_us(path: Path, chip: str, call: str, kind: str, granularity: str) -> float | None:
    """What was measured on a chip, for ``ELEMENTS``; ``None`` if nothing was."""
    found: dict[str, float] = {}
    for row in _figures(path):
        is_this = row["way"] == "qtk" and row["kind"] == kind and row["granularity"] == MEASURED_AS.get(granularity)
        elements = int(row["elements"])
        if is_this and re.search(rf"\b{chip}\b", row["device_name"]) and elements >= ELEMENTS / 2:
            found[row["action"]] = float(row["median_us"]) * ELEMENTS / elements
    if call == "backward, learned" and len(found) == 2:
        return found["forward + backward"] - found["forward"]
    return found.get(call)


@functools.cache
def _figures(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", choices=list(CHIPS), default=list(CHIPS))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--granularities", nargs="+", choices=list(BLOCKS), default=list(BLOCKS))
    parser.add_argument("--calls", nargs="+", choices=list(CALLS), default=list(CALLS))
    parser.add_argument("--shapes", nargs="+", type=_shape, default=[SHAPE], help="rows x columns: 4095x1023")
    parser.add_argument("--json", type=Path, help="file to write")
    options = parser.parse_args()
    found = list(rows(options.chips, options.kinds, options.granularities, options.calls, options.shapes))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    table = Table(title=f"{len(found)} kernels")
    for key in found[0]:
        table.add_column(key)
    for row in found:
        table.add_row(*map(_cell, row.values()))
    Console(width=260).print(table)


def _shape(text: str) -> tuple[int, int]:
    rows, columns = text.split("x")
    return int(rows), int(columns)


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
