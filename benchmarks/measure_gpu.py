"""Fills the tables of RESULTS.md that need a GPU: ``make bench-gpu``, about ten minutes.

Runs the benchmarks below one after the other, each in a process of its own, and writes what they measured as Markdown:
all tables to ``benchmarks/results/gpu.md``, and each between its marks in RESULTS.md, ``<!-- gpu:NAME -->`` and
``<!-- /gpu:NAME -->``; the figures to ``benchmarks/results/NAME_gpu.csv``, from which ``kernels/inspect_gpu.py`` shows
them beside its roofline. A benchmark that fails, or that the time does not suffice for, leaves its table as it was.

Exits with 0 if all tables were written, 1 if some were not, 2 if there is no GPU: then nothing is run or written.

    python benchmarks/measure_gpu.py
    python benchmarks/measure_gpu.py --only kernels launch --minutes 3
    python benchmarks/measure_gpu.py --quick                     # small sizes: does everything run?
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent
RESULTS = BENCHMARKS / "RESULTS.md"
TABLES = BENCHMARKS / "results" / "gpu.md"
NO_GPU = ("no GPU: torch.cuda.is_available() is false. Nothing was measured and no file was changed. Run this on a "
          "machine with a GPU and a torch that was built for it (python -c 'import torch; print(torch.version.cuda)').")


@dataclass(frozen=True)
class Section:
    """One benchmark and its table: ``columns`` of its CSV file → headings.

    Where ``across`` is given, every entry of these columns gets a column of the table; its cells hold ``values``.
    """

    name: str
    script: str
    options: tuple[str, ...]
    columns: Mapping[str, str]
    quick: tuple[str, ...] = ("--quick",)
    csv: str = "--csv"
    across: tuple[str, ...] = ()
    values: tuple[str, str] = ("", "")

    def command(self, into: Path, *, quick: bool) -> list[str]:
        options = [*self.options, *(self.quick if quick else ())]
        return [sys.executable, str(BENCHMARKS / self.script), *options, self.csv, str(into)]


KERNEL = {"action": "pass", "kind": "dtype", "granularity": "scales", "way": "way", "median_us": "µs",
          "times_copy": "× copy_"}
MODEL = {"model": "model", "dtype": "dtype", "batch": "batch", "run": "run", "way": "way", "median_ms": "ms",
         "ratio": "× float"}
ON_GPU = ("--device", "cuda")
AIMET = ("AIMET",) if importlib.util.find_spec("aimet_torch") else ()
SECTIONS = (
    Section("kernels", "kernels/bench_fake_quantize.py", (*ON_GPU, "--sizes", "64", "--repeats", "5"), KERNEL,
            across=("action", "way"), values=("median_us", "times_copy")),
    Section("launch", "kernels/bench_launch.py", (*ON_GPU, "--repeats", "9"),
            {"way": "way", "median_us": "µs", "times_copy": "× copy_"},
            across=("way",), values=("median_us", "times_copy")),
    Section("simulation", "models/bench_simulation.py", (*ON_GPU, "--batch-size", "64", "--dtype", "bfloat16"), MODEL,
            across=("way",), values=("median_ms", "ratio")),
    Section("layerwise", "calibration/bench_layerwise.py",
            (*ON_GPU, "--granularities", "per_channel", "128", "--ways", "SeqMSE", "GPTQ", *AIMET,
             "--repeats", "3"),
            {"model": "model", "granularity": "scales", "way": "way", "median_s": "s", "ratio": "× float forward",
             "error": "error / signal", "error_unseen": "unseen data"},
            ("--models", "3 MLP blocks", "--granularities", "per_channel", "--repeats", "1")),
)


def markdown(rows: Sequence[Mapping[str, str]], columns: Mapping[str, str]) -> str:
    """The table of ``columns``, numbers rounded to three digits; a row of a speed without a figure holds a dash.

    >>> print(markdown([{"way": "qtk", "us": "12.3456"}, {"way": "copy_", "us": ""}], {"way": "way", "us": "µs"}))
    | way | µs |
    |---|---|
    | qtk | 12.3 |
    | copy_ | – |
    """
    lines = ["| " + " | ".join(columns.values()) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_shown(row[column]) for column in columns) + " |" for row in rows]
    return "\n".join(lines)


def spread(rows: Sequence[Mapping[str, str]], section: Section) -> tuple[list[dict[str, str]], dict[str, str]]:
    """The rows and columns of a table with a column for every entry of ``section.across``."""
    keys = [column for column in section.columns if column not in (*section.across, *section.values)]
    columns = {key: section.columns[key] for key in keys}
    table: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        heading = ", ".join(row[column] for column in section.across)
        columns[heading] = heading
        first, second = (_shown(row[value]) for value in section.values)
        line = table.setdefault(tuple(row[key] for key in keys), {key: row[key] for key in keys})
        line[heading] = f"{first} ({second})"
    return [{column: line.get(column, "") for column in columns} for line in table.values()], columns


def _shown(value: str) -> str:
    if value == "":
        return "–"
    try:
        number = float(value)
    except ValueError:
        return value
    return f"{number:,.0f}" if abs(number) >= 1000 or value.isdigit() else f"{number:.3g}"


def with_table(text: str, name: str, table: str) -> str:
    """``text`` with ``table`` between the marks of ``name``.

    Raises: SystemExit if the marks are not there once each, in this order.
    """
    begin, end = f"<!-- gpu:{name} -->", f"<!-- /gpu:{name} -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed) or begin in after or text.count(end) != 1:
        raise SystemExit(f"{RESULTS.name} needs {begin} and {end} once each, in this order")
    return f"{before}{begin}\n{table}\n{end}{after}"


def described(section: Section, rows: Sequence[Mapping[str, str]], device: str, today: date) -> str:
    """The table with how it was made."""
    made = {key: rows[0][key] for key in ("commit", "torch", "triton", "backend") if key in rows[0]}
    command = " ".join(["python", f"benchmarks/{section.script}", *(f'"{option}"' if " " in option else option
                                                                    for option in section.options)])
    setting = ", ".join([f"{today:%B %Y}", device, *(f"{key} {value}" for key, value in made.items())])
    if not section.across:
        return f"`{command}`\n{setting}:\n\n{markdown(rows, section.columns)}"
    units, brackets = (section.columns[value] for value in section.values)
    return f"`{command}`\n{setting}; {units} ({brackets}):\n\n{markdown(*spread(rows, section))}"


def measured(section: Section, *, quick: bool, timeout_s: float) -> list[dict[str, str]] | str:
    """The rows of a benchmark, or why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "figures.csv"
        try:
            done = subprocess.run(section.command(into, quick=quick), timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired:
            return f"not done after {timeout_s:.0f} s; give it more --minutes, or run it with --only {section.name}"
        if done.returncode or not into.exists():
            return f"exit status {done.returncode}; see its message above"
        with into.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file)) or "no figures"


def device_name() -> str | None:
    """The name of the GPU, ``None`` if there is none."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def write(tables: Mapping[str, str], results: Path, into: Path) -> None:
    """Writes the tables into RESULTS.md and, together, to a file. Raises: as ``with_table``, before it writes."""
    text = results.read_text(encoding="utf-8")
    for name, table in tables.items():
        text = with_table(text, name, table)
    into.write_text("\n\n".join(f"## {name}\n\n{table}" for name, table in tables.items()) + "\n", encoding="utf-8")
    results.write_text(text, encoding="utf-8")


def keep(name: str, rows: Sequence[Mapping[str, str]]) -> None:
    """Writes the figures of a section beside the tables."""
    with TABLES.with_name(f"{name}_gpu.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns: the exit status."""
    names = [section.name for section in SECTIONS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--minutes", type=float, default=10, help="for all together")
    parser.add_argument("--quick", action="store_true", help="small sizes; prints the tables and writes no file")
    given = parser.parse_args(arguments)
    device = device_name()
    if device is None:
        print(NO_GPU, file=sys.stderr)
        return 2
    end = time.monotonic() + 60 * given.minutes
    tables, figures, missing = {}, {}, {}
    for section in [section for section in SECTIONS if section.name in given.only]:
        print(f"== {section.name}: {section.script}, {end - time.monotonic():.0f} s left", flush=True)
        found = measured(section, quick=given.quick, timeout_s=max(1.0, end - time.monotonic()))
        if isinstance(found, str):
            missing[section.name] = found
        else:
            tables[section.name] = described(section, found, device, date.today())
            figures[section.name] = found
    for table in tables.values():
        print(f"\n{table}")
    if tables and not given.quick:
        write(tables, RESULTS, TABLES)
        for name, rows in figures.items():
            keep(name, rows)
        print(f"\n{len(tables)} tables written to {TABLES} and {RESULTS}")
    for name, reason in missing.items():
        print(f"{name}: no table: {reason}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    raise SystemExit(main())
