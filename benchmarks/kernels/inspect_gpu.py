"""Compiles the GPU kernels for chips that need not be here, and prints what the compiled code does.

For every kernel, dtype, granularity and chip: launches a call; registers a thread and bytes spilled (must be 0); shared
memory; occupancy (the share of the resident warps that registers and shared memory leave room for); instructions that
load or store 128 bits, and less; true divisions in a turn of a thread, which has 16 elements; atomics. Bytes an element
is what the kernel must read and write, and the time that of 64 million elements at the chip's memory bandwidth: the
floor, not a measurement.

    python benchmarks/kernels/inspect_gpu.py
    python benchmarks/kernels/inspect_gpu.py --chips sm_90 --kinds float32 --json code.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from gpu_code import CHIPS, Chip, compiled, recorded
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm import tqdm

from qtk.kernels.gpu import candidate_errors, fake_quantize, fake_quantize_dynamic, fake_quantize_many, statistics

ROWS, COLUMNS = 4096, 1024
ELEMENTS = 64 << 20
BLOCKS = {
    "tensor": (), "row": (1, -1), "last_axis": (-1, 1), "block16": (1, 16), "block32": (1, 32), "block64": (1, 64),
    "block128": (1, 128),
}
SMALL = (1024, 1024), (512, 768)
"""Shapes of weights that share a launch; with learned ranges, those of one shape do."""
KINDS = ("float32", "bfloat16", "float16")
CODES = -128, 127


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


    def weights(self, *shapes: tuple[int, int]) -> tuple[list[Any], ...]:
        """The arguments of the ops of many tensors."""
        parts = [replace(self, x=self.x[:rows, :columns].contiguous()) for rows, columns in shapes]
        lists = ([part.x for part in parts], *([part.scale for part in parts] for _ in range(2)))
        return *lists, *([each] * len(parts) for each in (self.blocks, *CODES))


def forward(given: Given) -> None:
    fake_quantize.fake_quantize(given.x, given.scale, given.scale, given.blocks, *CODES)


def backward(given: Given) -> None:
    fake_quantize.fake_quantize_backward(given.x, given.x, given.scale, given.scale, given.blocks, *CODES, False, False)


def learned_backward(given: Given) -> None:
    fake_quantize.fake_quantize_backward(given.x, given.x, given.scale, given.scale, given.blocks, *CODES, True, True)


def many(given: Given) -> None:
    fake_quantize_many.fake_quantize_many(*given.weights(*SMALL))


def many_backward(given: Given) -> None:
    xs, *rest = given.weights(*SMALL)
    fake_quantize_many.fake_quantize_many_backward(xs, xs, *rest, [False] * len(xs), [False] * len(xs))


def many_learned_backward(given: Given) -> None:
    xs, *rest = given.weights(SMALL[0], SMALL[0])
    fake_quantize_many.fake_quantize_many_backward(xs, xs, *rest, [True] * len(xs), [True] * len(xs))


def small_learned_backward(given: Given) -> None:
    """Of one of the weights of ``many_learned_backward`` alone."""
    learned_backward(replace(given, x=given.x[: SMALL[0][0], : SMALL[0][1]].contiguous()))


def residual(given: Given) -> None:
    fake_quantize.fake_quantize_with_residual(given.x, given.scale, None, given.blocks, *CODES, True)


def dynamic(given: Given) -> None:
    fake_quantize_dynamic.fake_quantize_dynamic(given.x, given.blocks, 0, 255, False)


def min_max(given: Given) -> None:
    statistics.min_max(given.x, given.blocks, given.scale.numel())


def histogram(given: Given) -> None:
    flat = given.scale.reshape(-1)
    statistics.histogram(given.x, flat, torch.zeros_like(flat, dtype=torch.int32), 1023, given.blocks)


def errors(given: Given) -> None:
    scales = given.scale.reshape(1, -1).expand(20, -1).contiguous()
    candidate_errors.candidate_errors(given.x, scales, None, given.blocks, *CODES, True, None, 1.0)


@dataclass(frozen=True, slots=True)
class Call:
    """An op: how it is called, and how many tensors of the size of ``x`` it must read or write, beside bytes."""

    run: Callable[[Given], None]
    streams: int
    bytes_beside: int = 0

    def bytes_an_element(self, kind: torch.dtype) -> int:
        return self.streams * kind.itemsize + self.bytes_beside


CALLS = {
    "forward": Call(forward, 2), "backward": Call(backward, 3), "backward, learned": Call(learned_backward, 3),
    "many": Call(many, 2), "many, backward": Call(many_backward, 3),
    "many, backward, learned": Call(many_learned_backward, 3),
    "one of many, backward, learned": Call(small_learned_backward, 3),
    "with residual": Call(residual, 2, bytes_beside=2), "dynamic": Call(dynamic, 2), "min_max": Call(min_max, 1), "histogram": Call(histogram, 1),
    "candidate_errors": Call(errors, 1),
}


def rows(chips: list[str], kinds: list[str], granularities: list[str], calls: list[str]) -> Iterator[dict[str, object]]:
    cases = [(chip, call, kind, each) for chip in chips for call in calls for kind in kinds for each in granularities]
    for chip, name, kind, granularity in tqdm(cases, unit="case"):
        yield from inspected(CHIPS[chip], name, getattr(torch, kind), granularity)


def inspected(chip: Chip, name: str, kind: torch.dtype, granularity: str) -> Iterator[dict[str, object]]:
    call = CALLS[name]
    with recorded(chip) as launches:
        call.run(Given(torch.ones(ROWS, COLUMNS, dtype=kind), granularity))
    size = call.bytes_an_element(kind)
    for launch in launches:
        yield {
            "chip": f"{chip.target.arch} {chip.name}", "call": name, "kernel": launch.kernel.__name__,
            "kind": str(kind).removeprefix("torch."), "granularity": granularity, "launches": len(launches),
            **asdict(compiled(launch, chip)), "bytes": size, "floor_us": size * ELEMENTS / chip.bandwidth / 1e6,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", choices=list(CHIPS), default=list(CHIPS))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--granularities", nargs="+", choices=list(BLOCKS), default=list(BLOCKS))
    parser.add_argument("--calls", nargs="+", choices=list(CALLS), default=list(CALLS))
    parser.add_argument("--json", type=Path, help="file to write")
    options = parser.parse_args()
    found = list(rows(options.chips, options.kinds, options.granularities, options.calls))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    table = Table(title=f"{len(found)} kernels")
    columns = [key for key in found[0] if key != "sums"]  # long texts
    for key in columns:
        table.add_column(key)
    for row in found:
        values = [row[key] for key in columns]
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in values))
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
