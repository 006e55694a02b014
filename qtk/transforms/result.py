"""The result of a transform, group by group."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass

from qtk.core.site import Site


class Outcome(enum.Enum):
    """What became of a group: applied, left as it was for a reason, or undone because the outputs changed."""

    APPLIED = "applied"
    SKIPPED = "skipped"
    UNDONE = "undone"


@dataclass(frozen=True, slots=True)
class GroupResult:
    """What a transform did with one group of layers.

    Args:
        name: of the group: the batch norm, or the value whose channels are scaled.
        outcome: what became of it.
        detail: where the factors went, or why nothing was done.
        before: error of the quantized output before, in units that the transform names; ``None`` if not measured.
        after: the same afterwards.
    """

    name: str
    outcome: Outcome
    detail: str
    before: float | None = None
    after: float | None = None

    def __str__(self) -> str:
        error = "" if self.before is None or self.after is None else f"  error {self.before:.3g} → {self.after:.3g}"
        return f"{self.name}  {self.outcome.value}: {self.detail}{error}"


@dataclass(frozen=True, slots=True)
class TransformResult:
    """What a transform did, and how far the outputs on the example inputs moved; printable.

    Args:
        transform: its name.
        groups: one result for each group, in graph order.
        sites: of the values that the applied groups changed.
        difference: largest change of an output, relative to the largest output; ``None`` if it was to change.
        nothing: what the model has none of, for the message if there are no groups.
    """

    transform: str
    groups: tuple[GroupResult, ...]
    sites: tuple[Site, ...] = ()
    difference: float | None = None
    nothing: str = "nothing to do"

    @property
    def applied(self) -> tuple[GroupResult, ...]:
        """The groups that were rewritten."""
        return tuple(group for group in self.groups if group.outcome is Outcome.APPLIED)

    @property
    def skipped(self) -> tuple[GroupResult, ...]:
        """The groups that were left, each with the reason."""
        return tuple(group for group in self.groups if group.outcome is Outcome.SKIPPED)

    @property
    def undone(self) -> tuple[GroupResult, ...]:
        """The groups whose rewrite changed the outputs."""
        return tuple(group for group in self.groups if group.outcome is Outcome.UNDONE)

    @property
    def summary(self) -> str:
        """One line."""
        if not self.groups:
            return f"{self.transform}: {self.nothing}"
        counts = Counter(group.outcome.value for group in self.groups)
        parts = ", ".join(f"{counts[outcome.value]} {outcome.value}" for outcome in Outcome if counts[outcome.value])
        proof = "" if self.difference is None else f"; outputs changed by {self.difference:.1e}"
        return f"{self.transform}: {parts}{proof}"

    def __str__(self) -> str:
        return "\n".join([self.summary, *(f"  {group}" for group in self.groups)])
