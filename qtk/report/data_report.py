"""Whether calibration data are enough, and which batches stand out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from qtk.public import public
from qtk.report.table import Column, Table

LISTED = 5

WORSE_DB = 1.0
"""What the error rises with more batches where wider ranges harm, and more data do not help."""


@dataclass(frozen=True, slots=True)
class CalibrationSize:
    """A calibration with the first batches alone, measured on the batches that judge.

    Args:
        batches: how many.
        samples: in them.
        range_share: the mean over the sites of activations of their range, as a share of the range of all batches.
        sqnr_db: SQNR of the outputs against the float model's.
        changed: share of the predictions that are others than with all batches; ``None``: no output holds any.
    """

    batches: int
    samples: int
    range_share: float
    sqnr_db: float
    changed: float | None


@dataclass(frozen=True, slots=True)
class OddBatch:
    """A batch that is unlike the others.

    Args:
        index: its number in the data.
        score: how far its statistics are from the median batch, in robust standard deviations.
        site: where it is farthest.
        what: the statistic there, and its value beside the median, in words.
    """

    index: int
    score: float
    site: str
    what: str


@public
@dataclass(frozen=True, slots=True)
class DataReport:
    """Reports how far calibration data suffice: range, SQNR and predictions by number of batches; printable.

    Args:
        sizes: calibrations with ever more batches.
        recommended: batches after which neither predictions nor error change; ``None``: more than there are, or only
            one calibrates.
        odd: the batches that stand out, the oddest first.
        silent: site of activations → its channels that are 0 in all samples.
        experts: weight with a matrix for each expert → the rows (tokens) that reached each.
        judges: batches that judged, and calibrate in no size.
        source: of synthetic data, what they were made from; empty of a user's own.

    >>> size = CalibrationSize(1, 64, 0.8, 30.0, 0.25)
    >>> print(DataReport((size,), recommended=1, judges=1))
    calibration data: 1 batch is enough
     batches │ samples │ share of the range │ SQNR, dB │ predictions changed
    ─────────┼─────────┼────────────────────┼──────────┼─────────────────────
           1 │      64 │               0.80 │     30.0 │              25.0 %
    """

    sizes: tuple[CalibrationSize, ...]
    recommended: int | None
    odd: tuple[OddBatch, ...] = ()
    silent: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    experts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    judges: int = 0
    source: str = ""

    @property
    def verdict(self) -> str:
        """Says in words whether the data are enough."""
        most = self.sizes[-1].batches
        if self.recommended is None and len(self.sizes) == 1:
            text = "one batch calibrates, which shows nothing: give more batches, or smaller ones"
        elif self.recommended is None and self.sizes[0].sqnr_db - self.sizes[-1].sqnr_db > WORSE_DB:
            text = (f"the more batches, the worse: {self.sizes[0].sqnr_db:.1f} dB with {self.sizes[0].batches}, "
                    f"{self.sizes[-1].sqnr_db:.1f} with {most}, for ranges widen; pass scheme=\"mse\", which leaves "
                    "outliers out, or more bits")
        elif self.recommended is None:
            text = f"{most} batches are not enough: the last ones still change the result; give twice as many"
        else:
            text = f"{self.recommended} {'batch is' if self.recommended == 1 else 'batches are'} enough"
        return f"synthetic data, {self.source}: {text}" if self.source else text

    @property
    def decibels(self) -> tuple[float, ...]:
        """Returns the SQNR of each number of batches."""
        return tuple(each.sqnr_db for each in self.sizes)

    def table(self) -> Table:
        """Returns a table with a row for each number of batches."""
        columns = (Column("batches", number=True), Column("samples", number=True),
                   Column("share of the range", number=True), Column("SQNR, dB", number=True),
                   Column("predictions changed", number=True))
        rows = tuple(
            (f"{each.batches}", f"{each.samples}", f"{each.range_share:.2f}",
             "∞" if each.sqnr_db == math.inf else f"{each.sqnr_db:.1f}",
             "–" if each.changed is None else f"{each.changed:.1%}".replace("%", " %")) for each in self.sizes
        )
        return Table(f"calibration data: {self.verdict}", columns, rows)

    def lines(self) -> list[str]:
        """Returns the lines below the table: odd batches, dead channels, experts."""
        lines = [f"batch {each.index} stands out ({each.score:.0f} robust standard deviations): {each.what} at "
                 f"{each.site}" for each in self.odd]
        lines += [f"{site}: {len(channels)} channels are 0 in all samples ({_some(channels)})"
                  for site, channels in self.silent.items()]
        lines += [f"{name}: experts got {min(rows)} to {max(rows)} rows, {rows.count(0)} of {len(rows)} none"
                  for name, rows in self.experts.items()]
        return lines

    def __str__(self) -> str:
        return "\n".join([self.table().text(), *self.lines()])


def _some(numbers: tuple[int, ...]) -> str:
    return ", ".join([*map(str, numbers[:LISTED]), *(["…"] if len(numbers) > LISTED else [])])
