"""``qtk targets``: the shipped targets, and whether exported files keep the rules of theirs."""

from __future__ import annotations

import json
import os

from rich.console import Console

from qtk.config.files import shipped_names
from qtk.config.load import load_config
from qtk.public import public
from qtk.report.table import Column, Table
from qtk.workflow.check_target import TargetCheck, check_target


@public
def list_targets(console: Console) -> None:
    """Prints the shipped targets: their runtimes, the formats these take, and their rules."""
    rows = []
    for name in shipped_names("targets"):
        runtime = load_config(name).runtime
        if runtime is None:
            rows.append((name, "none in particular: what compilers have in common", "all", ""))
        else:
            says = "\n".join([*(f"{rule.name}: {rule.says}" for rule in runtime.rules),
                              *(f"not checked: {each.says}" for each in runtime.unchecked)])
            rows.append((name, runtime.name, ", ".join(runtime.formats), says))
    columns = (Column("target"), Column("runtime"), Column("formats"), Column("rules"))
    console.print(Table("shipped targets", columns, tuple(rows), tuple(range(1, len(rows)))).rich())


@public
def check(
    path: str | os.PathLike[str], console: Console, *, target: str | None = None, as_json: bool = False
) -> bool:
    """Prints what in exported files breaks the rules of the runtime they are for.

    Args:
        path: a file, or a directory that ``sim.export`` wrote.
        console: where to print.
        target: a shipped name or the path of a config; ``None``: what each file says.
        as_json: print JSON instead of tables.

    Returns: whether all rules are kept.

    Raises: QtkError if a file cannot be read, or the target is unknown.
    """
    checks = check_target(path, target)
    if as_json:
        console.print_json(json.dumps([_record(each) for each in checks]))
    else:
        for each in checks:
            _print(each, console)
    return not any(each.violations for each in checks)


def _print(each: TargetCheck, console: Console) -> None:
    console.print(str(each).partition("\n")[0], style=f"bold {'red' if each.violations else 'green'}", highlight=False,
                  markup=False)
    if each.violations:
        columns = (Column("place"), Column("found"), Column("rule"), Column("source"), Column("way out"))
        rows = tuple(
            (found.place, found.found, f"{found.rule.name}: {found.rule.says}",
             f"{found.source.url} ({found.source.version})", found.rule.fix) for found in each.violations
        )
        console.print(Table(f"{len(rows)} violations", columns, rows).rich())


def _record(each: TargetCheck) -> dict[str, object]:
    return {
        "path": str(each.path), "target": each.runtime.target, "tensors": each.tensors,
        "unchecked": [rule.name for rule in each.unchecked],
        "partly_checked": {rule.name: list(fields) for rule, fields in each.partly_checked},
        "violations": [
            {"place": found.place, "found": found.found, "rule": found.rule.name, "says": found.rule.says,
             "source": found.source.url, "version": found.source.version, "fix": found.rule.fix}
            for found in each.violations
        ],
    }
