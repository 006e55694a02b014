"""``qtk diff``: what differs between two quantized models that were written."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from qtk.cli.batches import Batches
from qtk.errors import ConfigError
from qtk.public import public
from qtk.workflow.diff import diff as compare


@public
def diff(
    first: Path, second: Path, console: Console, *, data: str | None = None, num_batches: int | None = None,
    as_json: bool = False, runtimes: str | None = None,
) -> bool:
    """Prints the differences.

    Args:
        first: what ``sim.save``, ``sim.export`` or ``qtk quantize`` wrote, or a file of it.
        second: likewise.
        console: where to print.
        data: ``module:callable`` that returns batches ``(inputs, label)``; ``None``: outputs are not compared.
        num_batches: how many of them; ``None``: all.
        as_json: print JSON instead of a table.
        runtimes: what runs the first file and the second, with a comma between; ``None``: as ``qtk.diff``.

    Returns: whether there are none.

    Raises: QtkError if a file or the data cannot be read; ConfigError if ``runtimes`` are not two.
    """
    named = None if runtimes is None else tuple(each.strip() for each in runtimes.split(","))
    if named is not None and len(named) != 2:
        raise ConfigError(f"--runtimes takes two, with a comma between, got {runtimes!r}; write for example "
                          "onnxruntime-off,onnxruntime-on")
    source = None if data is None else Batches(data, "--data", num_batches, labelled=False)
    batches = None if source is None else (inputs for inputs, _ in source.open()[0])
    found = compare(first, second, batches, runtimes=named)
    if as_json:
        console.print_json(json.dumps(found.to_json(), allow_nan=False))
    else:
        console.print(found.table().rich() if found.sites else found.title, markup=False, highlight=False)
        for line in found.lines():
            console.print(line, markup=False, highlight=False)
    return not found
