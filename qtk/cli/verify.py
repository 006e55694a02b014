"""``qtk verify``: what runtimes compute of exported files, how fast, and what to do about it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from qtk.cli.batches import Batches
from qtk.errors import ConfigError
from qtk.public import public
from qtk.report.summary import FLOAT
from qtk.report.verdict import Level, Verdict
from qtk.workflow.verify_export import LatencyRequest
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
    batches = None
    if num_batches is not None and num_batches < 1:
        raise ConfigError(f"--num-batches: got {num_batches}; must be at least 1, or left out for all")
    if data is not None:
        pairs, _ = Batches(data, "--data", num_batches).open()
        batches = (inputs for inputs, _ in pairs)
    verdicts = verify_files(
        directory, batches, runtime=runtime, valid=valid, progress=progress,
        latency=LatencyRequest(turns, batch_size, threads, float_export),
    )
    if as_json:
        console.print_json(json.dumps([verdict.to_json() for verdict in verdicts], allow_nan=False))
    else:
        for verdict in verdicts:
            _print(verdict, console)
    return all(verdict.level is not Level.RED for verdict in verdicts)


def _print(verdict: Verdict, console: Console) -> None:
    first, *others = verdict.summary()
    console.print(first, style=f"bold {COLORS[verdict.level]}", highlight=False, markup=False)
    for line in others:
        console.print(line, markup=False, highlight=False)
    for table in verdict.tables():
        console.print(table.rich())
    for line in verdict.lines():
        console.print(line, markup=False, highlight=False)
