"""What differs between two quantized models: encodings, codes of weights, outputs."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from qtk.public import public
from qtk.report.table import Column, Table


@dataclass(frozen=True, slots=True)
class SiteDifference:
    """A site that is not the same in both.

    Args:
        site: its name.
        change: what changed, in words: the format, the range, codes, a float parameter; or in which of the two the site
            is.
        steps: how far the farther end of the range moved, in steps of the first model, the most of all its scales;
            ``None`` where the formats differ.
        flipped: codes of a constant, or floats of a parameter, that are others; ``None`` of values that are computed.
        elements: of the constant.
        moved: of a float parameter, its largest change over its largest value; ``None`` of sites.
    """

    site: str
    change: str
    steps: float | None = None
    flipped: int | None = None
    elements: int | None = None
    moved: float | None = None


@dataclass(frozen=True, slots=True)
class OutputDifference:
    """How far the outputs of the second model are from the outputs of the first.

    Args:
        sqnr_db: all outputs together; inf where they are equal.
        agreement: share of equal predictions; ``None`` without any.
        measured_on: the data, in words.
    """

    sqnr_db: float
    agreement: float | None
    measured_on: str


@public
@dataclass(frozen=True, slots=True)
class QuantizationDiff:
    """Lists all differences of two quantized models; printable, and false if there is none.

    Args:
        first: name of the first.
        second: name of the second.
        sites: the sites that differ, in the order of the first.
        outputs: ``None`` if they were not run.

    >>> diff = QuantizationDiff("old", "new", (SiteDifference("fc:out", "range", 2.5),))
    >>> print(diff)
    old → new: 1 site differs
     site   │ change │ moved, steps │ codes flipped
    ────────┼────────┼──────────────┼───────────────
     fc:out │ range  │          2.5 │
    >>> bool(QuantizationDiff("old", "new", ())), str(QuantizationDiff("old", "new", ()))
    (False, 'old → new: no difference')
    """

    first: str
    second: str
    sites: tuple[SiteDifference, ...]
    outputs: OutputDifference | None = None

    def __bool__(self) -> bool:
        return bool(self.sites) or (self.outputs is not None and self.outputs.sqnr_db < math.inf)

    @property
    def title(self) -> str:
        count = len(self.sites)
        what = f"{count} {'site differs' if count == 1 else 'sites differ'}" if count else (
            "the sites are equal, the outputs are not" if self else "no difference")
        return f"{self.first} → {self.second}: {what}"

    def table(self) -> Table:
        """Returns a table with a row for each site that differs."""
        columns = (Column("site"), Column("change"), Column("moved, steps", number=True),
                   Column("codes flipped", number=True))
        rows = tuple(
            (each.site,
             each.change if each.moved is None else f"{each.change}, by up to {each.moved:.2g} of its largest",
             "" if each.steps is None else f"{each.steps:.3g}",
             "" if each.flipped is None else f"{each.flipped:,} of {each.elements:,}") for each in self.sites
        )
        return Table(self.title, columns, rows)

    def lines(self) -> list[str]:
        """Says what the outputs lose."""
        if self.outputs is None:
            return []
        outputs = self.outputs
        agreement = "" if outputs.agreement is None else f", {outputs.agreement:.2%} of the predictions equal"
        size = "equal" if outputs.sqnr_db == math.inf else f"SQNR {outputs.sqnr_db:.1f} dB"
        return [f"outputs on {outputs.measured_on}: {size}{agreement}"]

    def __str__(self) -> str:
        return "\n".join([self.table().text() if self.sites else self.title, *self.lines()])

    def to_json(self) -> dict[str, object]:
        """JSON values; what is infinite is ``None``."""
        outputs = None if self.outputs is None else asdict(self.outputs)
        if outputs is not None and not math.isfinite(outputs["sqnr_db"]):
            outputs["sqnr_db"] = None
        sites = [asdict(each) for each in self.sites]
        for each in sites:
            each["moved"] = None if each["moved"] == math.inf else each["moved"]
        return {"first": self.first, "second": self.second, "differs": bool(self), "sites": sites, "outputs": outputs}
