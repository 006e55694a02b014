"""What each site, or group of sites, costs at the output, as a list that prints as a table."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from qtk.report.table import Column, Table


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """What quantization of one site, or one group of sites, does to the loss.

    Args:
        name: of the site, or of the module whose sites are a group.
        sites: the sites that are switched together.
        increase: how much the loss is above float when only these are quantized.
        recovery: how much less than the simulation's the loss is when only these are not quantized; NaN if it was not
            measured.
        exact: both were measured; else the increase is an estimate.
        estimated_increase: the estimate by gradients.
    """

    name: str
    sites: tuple[str, ...]
    increase: float
    recovery: float
    exact: bool
    estimated_increase: float


class Sensitivities(list[Sensitivity]):
    """A list of sensitivities, the largest increase first; prints as a table.

    Args:
        rows: the rows.
        float_loss: loss of the float model.
        loss: loss of the simulation; NaN if nothing was measured.

    >>> rows = [Sensitivity("fc:out", ("fc:out",), 0.25, 0.5, True, 0.2)]
    >>> print(Sensitivities(rows, float_loss=1.0, loss=1.75))
    loss 1 in float, 1.75 quantized
     site   │ quantized alone │ alone in float │
    ────────┼─────────────────┼────────────────┼───────
     fc:out │       +2.50e-01 │      -5.00e-01 │ exact
    """

    def __init__(self, rows: Iterable[Sensitivity] = (), *, float_loss: float, loss: float) -> None:
        super().__init__(sorted(rows, key=lambda row: (math.isnan(row.increase), -row.increase)))
        self.float_loss, self.loss = float_loss, loss

    def top(self, count: int = 10) -> Sensitivities:
        """The first ``count``."""
        return Sensitivities(self[:count], float_loss=self.float_loss, loss=self.loss)

    def table(self) -> Table:
        """The table that is printed."""
        columns = (Column("site"), Column("quantized alone", number=True), Column("alone in float", number=True),
                   Column(""))
        rows = tuple(
            (row.name, "" if math.isnan(row.increase) else f"{row.increase:+.2e}",
             "" if math.isnan(row.recovery) else f"{-row.recovery:+.2e}",
             "exact" if row.exact else "no gradient" if math.isnan(row.increase) else "estimate") for row in self
        )
        quantized = "not measured" if math.isnan(self.loss) else f"{self.loss:.4g}"
        return Table(f"loss {self.float_loss:.4g} in float, {quantized} quantized", columns, rows)

    def __str__(self) -> str:
        return self.table().text()

    def __repr__(self) -> str:
        shown = ", ".join(f"{row.name} {row.increase:+.2e}" for row in self[:3])
        return f"Sensitivities({shown}{', …' if len(self) > 3 else ''}; {len(self)} rows)"
