"""Interleaved timing: each turn runs every action; figures are multiples of ``copy_`` in the same turn."""

from __future__ import annotations

import argparse
import csv
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

import qtk

MILLION = 1_000_000
BASE = "copy_"
FLOORS = (BASE, "clone")
TURN_S = 0.02
"""Short actions are repeated within a turn for about this long."""


@dataclass(frozen=True)
class Setting:
    """One benchmark case, independent of the implementation."""

    device: str
    kind: str
    granularity: str
    elements: int
    action: str
    copies: float | None = None
    """Least memory traffic of the case, in multiples of a copy."""


@dataclass(frozen=True)
class Timed:
    """The time of one implementation in one case."""

    setting: Setting
    way: str
    median_us: float
    copies: float

    @property
    def share_of_bandwidth(self) -> float | None:
        if self.setting.copies is None or self.way in FLOORS:
            return None
        return self.setting.copies / self.copies

    def row(self) -> dict[str, object]:
        return {**asdict(self.setting), "way": self.way, "median_us": self.median_us, "times_copy": self.copies,
                "share_of_bandwidth": self.share_of_bandwidth}


@dataclass(frozen=True)
class Given:
    """The parsed command-line options."""

    device: str
    kinds: Sequence[str]
    elements: Sequence[int]
    repeats: int
    csv: Path | None


def arguments(description: str | None, *, sizes: Mapping[str, Sequence[float]]) -> Given:
    """Args: sizes: of each device, in million elements."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kinds", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--sizes", nargs="+", type=float, help="million elements")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="one size, float32")
    parser.add_argument("--csv", type=Path)
    parsed = parser.parse_args()
    torch.set_num_threads(parsed.threads)
    chosen = parsed.sizes or ([2.4] if parsed.quick else sizes[parsed.device])
    elements = [max(256, int(size * MILLION) // 1536 * 1536) for size in chosen]
    return Given(parsed.device, ["float32"] if parsed.quick else parsed.kinds, elements, parsed.repeats, parsed.csv)


def multiples(actions: Mapping[str, Callable[[], object]], setting: Setting, given: Given) -> list[Timed]:
    """Times all actions in turns. ``actions`` holds ``copy_``."""
    loops = {}
    for way, run in actions.items():
        for _ in range(3):
            run()
        loops[way] = max(1, int(TURN_S / max(_seconds(run, 3, given.device), 1e-7)))
    taken: dict[str, list[float]] = {way: [] for way in actions}
    label = " ".join(str(value) for value in (setting.kind, setting.granularity, setting.action) if value)
    for _ in tqdm(range(given.repeats), desc=f"{label}, {setting.elements / MILLION:.4g} M", unit="turn", leave=False):
        for way, run in actions.items():
            taken[way].append(_seconds(run, loops[way], given.device))
    return [
        Timed(setting, way, statistics.median(own) * 1e6,
              statistics.median(mine / base for mine, base in zip(own, taken[BASE], strict=True)))
        for way, own in taken.items()
    ]


def finish(found: Sequence[Timed], given: Given) -> None:
    """Prints the table and writes the CSV file."""
    table = Table(title=f"multiples of {BASE}")
    for name in ("device", "dtype", "granularity", "M elements", "action", "way"):
        table.add_column(name)
    for name in ("µs", f"× {BASE}", "of bandwidth"):
        table.add_column(name, justify="right")
    for timed, following in zip(found, [*found[1:], None], strict=True):
        setting, share = timed.setting, timed.share_of_bandwidth
        table.add_row(
            setting.device, setting.kind, setting.granularity, f"{setting.elements / MILLION:.4g}", setting.action,
            timed.way, f"{timed.median_us:.1f}", f"{timed.copies:.2f}", "" if share is None else f"{100 * share:.0f} %",
            end_section=following is None or following.setting != setting,
        )
    Console(width=150).print(table)
    here = {"commit": commit(), "torch": torch.__version__, "triton": _triton(), "device_name": _name(given.device),
            "threads": torch.get_num_threads(), "backend": qtk.backends()[given.device]}
    print(", ".join(f"{key} {value}" for key, value in here.items()))
    if given.csv:
        write_csv(given.csv, here, [timed.row() for timed in found])


def write_csv(path: Path, setting: Mapping[str, object], rows: Sequence[Mapping[str, object]]) -> None:
    """Writes the rows as CSV, each with the fields of ``setting``."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*setting, *rows[0]])
        writer.writeheader()
        writer.writerows({**setting, **row} for row in rows)


def commit() -> str:
    """The commit, with ``*`` behind it if the working tree holds changes."""
    shown = subprocess.run(
        ["git", "describe", "--always", "--dirty=*", "--abbrev=12", "--exclude=*"],
        cwd=Path(__file__).parent, capture_output=True, text=True, check=False,
    )
    return shown.stdout.strip() or "unknown"


def _seconds(run: Callable[[], object], loops: int, device: str) -> float:
    """Seconds per call."""
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


def _triton() -> str:
    try:
        import triton
    except ImportError:
        return "none"
    return str(triton.__version__)


def _name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"
