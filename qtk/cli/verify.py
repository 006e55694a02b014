"""``qtk verify``: what runtimes compute of exported files, how fast, and what to do about it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from qtk.atomic import write_file
from qtk.cli.batches import Batches
from qtk.errors import ConfigError, ExportError
from qtk.public import public
from qtk.report.certificate import NAME, Certificate
from qtk.report.summary import FLOAT
from qtk.report.verdict import Level, Verdict
from qtk.workflow.certify import certify as certified
from qtk.workflow.certify import hashes_of
from qtk.workflow.verify_export import USUAL_LATENCY, LatencyRequest
from qtk.workflow.verify_files import verify_files

COLORS = {Level.GREEN: "green", Level.YELLOW: "yellow", Level.RED: "red"}


@public
def verify(
    directory: str | os.PathLike[str],
    console: Console,
    *,
    data: str | None = None,
    num_batches: int | None = None,
    float_export: str | os.PathLike[str] | None = None,
    runtime: str = "onnxruntime",
    turns: int = 30,
    batch_size: int = 1,
    threads: int | None = None,
    valid: Sequence[str] = (),
    as_json: bool = False,
    progress: bool = True,
) -> bool:
    """Prints the verdict on every file in ``directory``.

    Args:
        directory: what ``sim.export`` or ``qtk quantize`` wrote, or one file of it.
        console: where to print.
        data: ``module:callable`` that returns batches ``(inputs, label)``; ``None``: random values.
        num_batches: how many of them; ``None``: all.
        float_export: the float export; ``None``: ``fp32`` beside it, as ``qtk quantize`` writes it, if there.
        runtime: the runtime the files are for.
        turns: how often each runtime runs for the median of its latency.
        batch_size: the rows that the latency is of.
        threads: threads within an op; ``None`` leaves the number to the runtime.
        valid: inputs that say which tokens count, masks [samples, tokens]; empty: all count.
        as_json: print JSON instead of tables.
        progress: show bars.

    Returns: whether no verdict is red.

    Raises: QtkError if a file or the data cannot be read.
    """
    verified = Path(directory).resolve()
    beside = verified.parent / FLOAT
    if float_export is None and beside.is_dir() and beside != verified:
        float_export = beside
    verdicts = verify_files(
        directory, _batches(data, num_batches), runtime=runtime, valid=valid, progress=progress,
        latency=LatencyRequest(turns, batch_size, threads, float_export),
    )
    if as_json:
        console.print_json(json.dumps([verdict.to_json() for verdict in verdicts], allow_nan=False))
    else:
        for verdict in verdicts:
            _print(verdict, console)
    return all(verdict.level is not Level.RED for verdict in verdicts)


@public
def certify(
    directory: str | os.PathLike[str],
    console: Console,
    *,
    data: str | None = None,
    num_batches: int | None = None,
    latency: LatencyRequest = USUAL_LATENCY,
    checks: bool = False,
    as_json: bool = False,
    progress: bool = True,
) -> bool:
    """Runs the files of a directory in every installed runtime, and writes the certificate or checks it again.

    Args:
        directory: what ``sim.export`` or ``qtk quantize`` wrote.
        console: where to print.
        data: ``module:callable`` that returns batches ``(inputs, label)``; ``None``: random values.
        num_batches: how many of them; ``None``: all.
        latency: the latency to measure.
        checks: compare with the ``certificate.json`` that is there, and leave it as it is; else write it.
        as_json: print JSON instead of a table.
        progress: show bars.

    Returns: whether no verdict is red or, where the certificate is checked, nothing is worse than it says.

    Raises: QtkError if a file or the data cannot be read, or there is no certificate to check.
    """
    path = Path(directory) / NAME
    before = Certificate.load(path) if checks else None
    try:
        now = certified(directory, _batches(data, num_batches), latency=latency, progress=progress)
    except ExportError as error:
        changed = [] if before is None else before.changed_files(hashes_of(directory))
        if not changed:
            raise
        _print_worse([*changed, str(error)], console, as_json=as_json)
        return False
    worse, other = before.changes(now) if before is not None else ([], [])
    if before is None:
        write_file(path, (json.dumps(now.to_json(), indent=1, allow_nan=False) + "\n").encode())
    if as_json:
        console.print_json(json.dumps({**now.to_json(), "worse": worse, "other": other}, allow_nan=False))
    else:
        console.print(now.table().rich())
        lines = [*now.findings, *(f"{title} is not installed: {package} is missing"
                                  for title, package in now.absent.items())]
        lines += [f"other: {each}" for each in other] + [f"worse: {each}" for each in worse]
        lines.append(f"written to {path}" if before is None else
                     f"{path}: {'not ' if worse else ''}as certified")
        for line in lines:
            console.print(line, markup=False, highlight=False)
    return not worse if before is not None else now.level is not Level.RED


def _print_worse(worse: list[str], console: Console, *, as_json: bool) -> None:
    """Prints what is worse than certified where the files cannot be run again."""
    if as_json:
        console.print_json(json.dumps({"worse": worse}))
    else:
        for each in worse:
            console.print(f"worse: {each}", markup=False, highlight=False)


def _batches(data: str | None, num_batches: int | None) -> Iterator[object] | None:
    """The batches of ``data`` without their labels. Raises: ConfigError for less than one batch."""
    if num_batches is not None and num_batches < 1:
        raise ConfigError(f"--num-batches: got {num_batches}; must be at least 1, or left out for all")
    if data is None:
        return None
    pairs, _ = Batches(data, "--data", num_batches, labelled=False).open()
    return (inputs for inputs, _ in pairs)


def _print(verdict: Verdict, console: Console) -> None:
    first, *others = verdict.summary()
    console.print(first, style=f"bold {COLORS[verdict.level]}", highlight=False, markup=False)
    for line in others:
        console.print(line, markup=False, highlight=False)
    for table in verdict.tables():
        console.print(table.rich())
    for line in verdict.lines():
        console.print(line, markup=False, highlight=False)
