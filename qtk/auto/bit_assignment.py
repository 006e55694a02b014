"""The widths that ``assign_bits`` found: a table to read, a config to edit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from qtk.analysis.float_outputs import sqnr_db
from qtk.atomic import write_file
from qtk.auto.widths import Choice
from qtk.config.files import shipped_names
from qtk.config.load import load_config
from qtk.config.schema import QuantConfig
from qtk.errors import ExportError
from qtk.public import public
from qtk.report.table import Column, Table


@dataclass(frozen=True, slots=True)
class Assigned:
    """The width of one site, or of several that no rule can set apart.

    Args:
        name: of the first site.
        sites: all of them.
        width: bits, or ``float``.
        losses: choice → what the output is estimated to lose if only these sites have it.
    """

    name: str
    sites: tuple[str, ...]
    width: Choice
    losses: Mapping[Choice, float]


@dataclass(frozen=True, slots=True)
class MeasuredWidths:
    """A whole assignment, measured.

    Args:
        what: ``assigned``, or ``all 8 bits``.
        cost: in the unit of the budget.
        loss: of the simulation; by default the error of the outputs relative to their power.
        estimated: the same, as the sum over sites; NaN if a site has no estimate.
        fits: whether the cost is within the budget.
    """

    what: str
    cost: float
    loss: float
    estimated: float
    fits: bool


@public
@dataclass(frozen=True, slots=True, eq=False)
class BitAssignment:
    """Holds the widths that ``assign_bits`` found; prints as a table.

    Args:
        unit: what the budget counts.
        budget: how much it allows.
        rows: the widths; first the sites that would lose most in the fewest bits.
        measured: the assignment taken first, then others that were measured.
        frontier: (cost, estimated loss) of the best assignments for all budgets.
        config: the config of the simulation, with a rule for every site.
        base: the config that it extends.
        widths: the widths that ``QuantSim`` was given for weights and activations; ``None`` where it was given none.
        is_loss: whether losses come from a function of the user, and are not the error of the outputs.
    """

    unit: str
    budget: float
    rows: tuple[Assigned, ...]
    measured: tuple[MeasuredWidths, ...]
    frontier: tuple[tuple[float, float], ...]
    config: QuantConfig
    base: QuantConfig
    widths: tuple[int | None, int | None] = (None, None)
    is_loss: bool = False

    @property
    def cost(self) -> float:
        """Returns what it costs, in the unit of the budget."""
        return self.measured[0].cost

    def table(self) -> Table:
        """Returns what was measured, then a row for each site."""
        choices = list(self.rows[0].losses) if self.rows else []
        columns = (Column("site"), Column("bits", number=True),
                   *(Column(f"loss at {each}", number=True) for each in choices))
        rows = tuple((row.name + (f" and {len(row.sites) - 1} more" if len(row.sites) > 1 else ""), str(row.width),
                      *(f"{row.losses[each]:.1e}" for each in choices)) for row in self.rows)
        return Table(f"{self.unit}: {self.cost:,.6g} of {self.budget:,.6g}", columns, rows)

    def summary(self) -> Table:
        """Returns what was measured: this assignment beside equal widths everywhere."""
        columns = (Column("widths"), Column(self.unit, number=True),
                   Column("loss" if self.is_loss else "SQNR, dB", number=True), Column("estimated", number=True),
                   Column(""))
        rows = tuple((each.what, f"{each.cost:,.6g}", self._shown(each.loss), self._shown(each.estimated),
                      "" if each.fits else "over the budget") for each in self.measured)
        return Table("measured on the data given, which calibration saw", columns, rows)

    def _shown(self, loss: float) -> str:
        return f"{loss:.4g}" if self.is_loss else f"{sqnr_db(loss):.1f}"

    def __str__(self) -> str:
        return f"{self.table().text()}\n\n{self.summary().text()}"

    def save(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Writes the config as YAML, one rule for each width: move a path from one to another to change it.

        ``QuantSim(model, example_inputs, config=path)`` plans the same widths.

        Raises: ExportError if the file exists without ``force``, or cannot be written.
        """
        target = Path(path)
        if target.exists() and not force:
            raise ExportError(f"{target} exists; pass force=True to replace it, or another path")
        taken = self.measured[0]
        head = (f"# {self.unit}: {self.cost:,.6g} of {self.budget:,.6g}; measured "
                f"{'loss' if self.is_loss else 'SQNR in dB'} {self._shown(taken.loss)}.\n"
                "# Move a path from one rule to another to change its width.\n")
        try:
            write_file(target, (head + yaml.safe_dump(self.content(), sort_keys=False, width=100)).encode())
        except OSError as error:
            raise ExportError(f"{target} cannot be written: {error}") from error

    def content(self) -> dict[str, object]:
        """Returns what ``save`` writes."""
        count = len(self.base.rules)
        rules = [rule.model_dump(mode="json", exclude_defaults=True) for rule in self.config.rules[count:]]
        name = _shipped(self.base)
        if name is None:
            written = self.config.model_dump(mode="json", exclude_defaults=True)
            written["rules"] = [*written.get("rules", ())[:count], *rules]
        else:
            written = {"version": 1, "extends": name, "rules": rules}
        defaults = dict(written.get("defaults", {}))
        for key, bits in zip(("weight", "activation"), self.widths, strict=True):
            setting = defaults.get(key, {})
            if bits is not None and isinstance(setting, dict):
                defaults[key] = {**{k: v for k, v in setting.items() if k != "dtype"}, "bits": bits}
        return {"version": 1, **written, **({"defaults": defaults} if defaults else {})}


def _shipped(config: QuantConfig) -> str | None:
    """The name of the shipped target that a config is, whose rules may then stay without effect."""
    for name in shipped_names("targets"):
        known = load_config(name)
        if known == config and all(rule.optional for rule in known.rules):
            return name
    return None
