"""What was tried to find the settings of a simulation, what each trial gained and what it cost."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from qtk.report.table import Column, Table


@dataclass(frozen=True, slots=True)
class Trial:
    """One trial.

    Args:
        step: what was tried on top of what was kept so far.
        seconds: how long it took.
        sqnr_db: SQNR of the outputs against the float model's, on data that calibration did not see; ``None`` if the
            trial failed.
        drop: by how much the metric is below float's; ``None`` if it was not measured.
        kept: whether later trials build on it.
        reason: why it was not kept; ``None`` if it was.
        size_bytes: of the parameters, as they are stored; ``None`` if the trial failed.
        latency_ms: of one call in the runtime; ``None`` if it was not measured.
    """

    step: str
    seconds: float
    sqnr_db: float | None = None
    drop: float | None = None
    kept: bool = False
    reason: str | None = None
    size_bytes: int | None = None
    latency_ms: float | None = None


@dataclass(slots=True)
class Account:
    """All trials of a run, and how it ended; printable.

    Args:
        metric: what drops: the name of the function that evaluates, or ``output error``.
        max_drop: the drop that was asked for.
        trials: in the order of the run.
        end: how it ended, and what can be done.
    """

    metric: str
    max_drop: float
    trials: list[Trial] = field(default_factory=list)
    end: str = ""

    @property
    def best(self) -> Trial | None:
        """The last trial that was kept."""
        return next((trial for trial in reversed(self.trials) if trial.kept), None)

    @property
    def reached(self) -> bool:
        """Whether the drop that was asked for is met."""
        best = self.best
        return best is not None and best.drop is not None and best.drop <= self.max_drop

    def table(self) -> Table:
        """One row for each trial."""
        columns = (Column("tried"), Column("drop", number=True), Column("held-out SQNR, dB", number=True),
                   Column("size, MB", number=True), Column("latency, ms", number=True),
                   Column("time, s", number=True), Column("result"))
        rows = tuple(
            (trial.step, "–" if trial.drop is None else f"{trial.drop:.4g}",
             "–" if trial.sqnr_db is None else "∞" if trial.sqnr_db == math.inf else f"{trial.sqnr_db:.1f}",
             "–" if trial.size_bytes is None else f"{trial.size_bytes / 1e6:.3g}",
             "–" if trial.latency_ms is None else f"{trial.latency_ms:.3g}",
             f"{trial.seconds:.1f}", "kept" if trial.reason is None else trial.reason)
            for trial in self.trials
        )
        return Table(f"drop of {self.metric}, at most {self.max_drop:g} asked", columns, rows)

    def __str__(self) -> str:
        return f"{self.table().text()}\n{self.end}"
