"""How latencies were measured, and which ops take the time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qtk.report.table import Column, Table

SHOWN, LARGE_SHARE, SMALL_SHARE = 5, 0.1, 0.01
"""How many ops are shown, of the ops with a tenth of the time or slower than in float; a hundredth is no loss."""


@dataclass(frozen=True, slots=True)
class Timing:
    """What a latency is of.

    Args:
        asked: the rows that were to be timed.
        rows: how many rows ran; ``None`` if no input has a batch axis.
        threads: threads within an op; ``None``: as many as the runtime takes by itself.
        cpus: the CPUs that it may use.
        shapes: the names and shapes of the inputs.

    >>> print(Timing(1, 1, 2, 8))
    batch 1, 2 threads
    >>> print(Timing(1, 64, None, 8))
    batch 64 (the file does not run on 1 row), the runtime's own number of threads on 8 CPUs
    """

    asked: int
    rows: int | None
    threads: int | None
    cpus: int
    shapes: str = ""

    def __str__(self) -> str:
        fixed = f"the file's fixed batch{self.shapes and f', {self.shapes}'}"
        rows = fixed if self.rows is None else f"batch {self.rows}"
        if self.rows not in (None, self.asked):
            rows += f" (the file does not run on {_count(self.asked, 'row')})"
        own = f"the runtime's own number of threads on {_count(self.cpus, 'CPU')}"
        return f"{rows}, {own if self.threads is None else _count(self.threads, 'thread')}"

    def to_json(self) -> dict[str, object]:
        """Every field."""
        return {"asked": self.asked, "rows": self.rows, "threads": self.threads, "cpus": self.cpus,
                "shapes": self.shapes}


@dataclass(frozen=True, slots=True)
class OpTime:
    """The time of an op of the model in one run.

    Args:
        op: its name, with what quantizes its result.
        kinds: the runtime's nodes that compute it, the slowest first.
        time_ms: of all of them.
        float_ms: the time of the op in the float file; ``None`` if that has no such op.
        share: of the time of all nodes, 0…1.
    """

    op: str
    kinds: tuple[str, ...]
    time_ms: float
    float_ms: float | None
    share: float

    @property
    def lost_ms(self) -> float:
        """Says how much slower it is than in float; all its time where float has no such op."""
        return self.time_ms - (self.float_ms or 0.0)

    def to_json(self) -> dict[str, object]:
        """Every field."""
        return {"op": self.op, "kinds": list(self.kinds), "time_ms": self.time_ms, "float_ms": self.float_ms,
                "share": self.share}


def slowest(
    times: Mapping[str, Sequence[tuple[str, float]]], float_times: Mapping[str, float] | None
) -> tuple[OpTime, ...]:
    """The ops that take a tenth of the time or are slower than in float, what loses most first.

    Args:
        times: op → the kind and the time in ms of each node that computes it.
        float_times: op → its time in ms in the float file; ``None`` if there is none.
    """
    total = sum(ms for nodes in times.values() for _, ms in nodes)
    found = []
    for op, nodes in times.items():
        ordered = sorted(nodes, key=lambda node: -node[1])
        ms = sum(each for _, each in nodes)
        float_ms = None if float_times is None else float_times.get(op)
        found.append(OpTime(op, tuple(dict.fromkeys(kind for kind, _ in ordered)), ms, float_ms, ms / total))
    worth = [
        each for each in found if each.share >= LARGE_SHARE
        or (float_times is not None and each.lost_ms > 0 and each.share >= SMALL_SHARE)
    ]
    return tuple(sorted(worth, key=lambda each: -each.lost_ms)[:SHOWN])


def slowest_table(ops: Sequence[OpTime], timing: Timing | None) -> Table:
    """A row for each op."""
    columns = (Column("op"), Column("nodes"), *(Column(heading, number=True) for heading in (
        "ms", "float, ms", "of the time")))
    rows = tuple(
        (each.op, ", ".join(each.kinds[:3]), f"{each.time_ms:.3g}",
         "–" if each.float_ms is None else f"{each.float_ms:.3g}", f"{each.share:.0%}") for each in ops
    )
    return Table(f"slowest ops{'' if timing is None else f', {timing}'}", columns, rows)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
