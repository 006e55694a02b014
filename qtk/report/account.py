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
        drop: by how much the metric is below float's; ``None`` if it was not measured. Of scores per sample, the mean
            over the samples that the search sees.
        kept: whether later trials build on it.
        reason: why it was not kept; ``None`` if it was.
        size_bytes: of the parameters, as they are stored; ``None`` if the trial failed.
        latency_ms: of one call in the runtime; ``None`` if it was not measured.
        run_time: about how long a call takes in the target's runtime over float's, estimated; ``None`` if the trial
            failed.
        bound: the drop is at most that, with the confidence asked for, by samples that the search does not see;
            ``None`` if it was not judged.
    """

    step: str
    seconds: float
    sqnr_db: float | None = None
    drop: float | None = None
    kept: bool = False
    reason: str | None = None
    size_bytes: int | None = None
    latency_ms: float | None = None
    run_time: float | None = None
    bound: float | None = None


@dataclass(slots=True)
class Account:
    """All trials of a run, and how it ended; printable.

    Args:
        metric: what drops: the name of the function that evaluates, or ``output error``.
        max_drop: the drop that was asked for.
        trials: in the order of the run.
        end: how it ended, and what can be done.
        confidence: of the bounds; ``None`` where a number was evaluated, whose drop is measured, not promised.
        needed: about how many samples would hold the drop of the best trial; ``None``: no number, or none is promised.
        classes: class, drop and number of samples, of the best trial, the worst first; empty without labels.
    """

    metric: str
    max_drop: float
    trials: list[Trial] = field(default_factory=list)
    end: str = ""
    confidence: float | None = None
    needed: int | None = None
    classes: tuple[tuple[int, float, int], ...] = ()

    @property
    def best(self) -> Trial | None:
        """The last trial that was kept."""
        return next((trial for trial in reversed(self.trials) if trial.kept), None)

    @property
    def reached(self) -> bool:
        """Says whether the drop that was asked for is met: with the confidence, where scores per sample give bounds."""
        best = self.best
        drop = None if best is None else best.drop if self.confidence is None else best.bound
        return drop is not None and drop <= self.max_drop

    def table(self) -> Table:
        """One row for each trial."""
        bounded = () if self.confidence is None else (Column(f"at most, {self.confidence:.4g}", number=True),)
        columns = (Column("tried"), Column("drop", number=True), *bounded, Column("held-out SQNR, dB", number=True),
                   Column("size, MB", number=True), Column("about × float ms", number=True),
                   Column("latency, ms", number=True), Column("time, s", number=True), Column("result"))
        rows = tuple(
            (trial.step, "–" if trial.drop is None else f"{trial.drop:.4g}",
             *("–" if trial.bound is None else f"{trial.bound:.4g}" for _ in bounded),
             "–" if trial.sqnr_db is None else "∞" if trial.sqnr_db == math.inf else f"{trial.sqnr_db:.1f}",
             "–" if trial.size_bytes is None else f"{trial.size_bytes / 1e6:.3g}",
             "–" if trial.run_time is None else f"{trial.run_time:.2f}",
             "–" if trial.latency_ms is None else f"{trial.latency_ms:.3g}",
             f"{trial.seconds:.1f}", "kept" if trial.reason is None else trial.reason)
            for trial in self.trials
        )
        return Table(f"drop of {self.metric}, at most {self.max_drop:g} asked", columns, rows)

    def __str__(self) -> str:
        worst = [f"worst class {label}: drop {drop:.4g} of {count} samples" for label, drop, count in self.classes[:1]]
        return "\n".join([self.table().text(), self.end, *worst])
