"""``qtk compare``: the error at every site of a recipe's models, worst first."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import TypeVar

from rich.console import Console

from qtk.cli.quantize import RecipeRun, calibration_of
from qtk.cli.recipe import Recipe
from qtk.errors import ConfigError
from qtk.public import public
from qtk.quantsim import QuantSim
from qtk.registry import nearest
from qtk.report.site_errors import SiteError

Entry = TypeVar("Entry")


@public
def compare(
    recipe: Recipe,
    console: Console,
    *,
    progress: Console,
    models: Iterable[str] = (),
    settings: Iterable[str] = (),
    simulation: str | os.PathLike[str] | None = None,
    top: int | None = None,
    as_json: bool = False,
) -> None:
    """Prints own and accumulated error at every site over the recipe's calibration data.

    Args:
        recipe: its models and settings; nothing is exported.
        console: where to print.
        progress: where progress is printed.
        models: names of the models; empty: all.
        settings: names of the settings; empty: all.
        simulation: what ``sim.save`` wrote of the one model, instead of the settings.
        top: how many sites of each; ``None``: all.
        as_json: print JSON instead of tables.

    Raises: QtkError if a name is unknown, the simulation belongs to another model, or the model or the data do not run.
    """
    entries = _named("--model", models, {entry.name: entry for entry in recipe.models})
    chosen = _named("--setting", settings, {setting.name: setting for setting in recipe.settings})
    if top is not None and top < 1:
        raise ConfigError(f"--top: got {top}; must be at least 1, or left out for all")
    if simulation is not None and (len(entries) > 1 or tuple(settings)):
        raise ConfigError("--simulation is of one model and has its own settings; name the model with --model, and "
                          "leave --setting out")
    searched = [setting.name for setting in chosen if setting.auto is not None and simulation is None]
    if searched:
        raise ConfigError(f"{', '.join(searched)}: auto is searched anew by every run; name what qtk quantize found in "
                          "a setting, or pass others by --setting")
    calibration = calibration_of(recipe)
    records = []
    for entry in entries:
        run = RecipeRun(recipe, entry, calibration, progress)
        sims = ((setting.name, run.calibrated(setting)[0]) for setting in chosen) if simulation is None else (
            (os.fspath(simulation), QuantSim.load(simulation, run.model, run.example)),)
        for name, sim in sims:
            pairs, count = calibration.open()
            errors = sim.compare((inputs for inputs, _ in pairs), num_batches=count, progress=run.progress,
                                 valid=recipe.data.valid)
            errors = errors if top is None else errors.top(top)
            records.append({"model": entry.name, "setting": name, "sites": [_record(error) for error in errors]})
            if not as_json:
                title = f"{entry.name}, {name}: {errors.order}"
                console.print(replace(errors.table(), title=title).rich())
    if as_json:
        console.print_json(json.dumps(records, allow_nan=False))


def _named(option: str, names: Iterable[str], known: Mapping[str, Entry]) -> list[Entry]:
    names = tuple(names)
    for name in names:
        if name not in known:
            raise ConfigError(f"{option}: the recipe has none called {name!r}; {nearest(name, known)}")
    return [value for name, value in known.items() if name in names or not names]


def _record(error: SiteError) -> dict[str, object]:
    numbers = {name: value for name, value in asdict(error).items() if name != "site"}
    return {"site": error.site, **{name: _finite(value) for name, value in numbers.items()}}


def _finite(value: float) -> float | None:
    """JSON has no infinity (an exact site) and no NaN (nothing to compare): both are null."""
    return value if math.isfinite(value) else None
