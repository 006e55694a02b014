"""The verdict on exported files: what runtimes compute of them, how fast, and what to do about it."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from pathlib import Path

from qtk.report.difference import Difference
from qtk.report.runtime_nodes import RuntimeNodes
from qtk.report.table import Column, Table
from qtk.report.timing import OpTime, Timing, slowest_table

NOTHING = "–"

OFF, ON, EXACT, OPENVINO = "optimizations off", "optimizations on", "exact x86 mode", "OpenVINO"
"""The ways in which a file is run."""


class Level(enum.Enum):
    """How serious a finding is: nothing, worth knowing, or a file that must not be used like this."""

    GREEN = "green"
    YELLOW = "yellow"
    RED = "red"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found, and what to do.

    Args:
        level: how serious it is.
        cause: what was found, and where.
        remedy: what to do.
    """

    level: Level
    cause: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.level.value}: {self.cause}; {self.remedy}"


@dataclass(frozen=True)
class FileRun:
    """A file in one runtime, compared with the simulation.

    Args:
        way: how the file is run: ``OFF``, ``ON``, ``EXACT``, ``OPENVINO``.
        runtime: the runtime, its version and its settings.
        total: the differences over all outputs; ``None`` if the runtime refuses the file.
        top1: share of equal argmax over the last axis of the first output; ``None`` if that has no such axis.
        outputs: the differences of each output.
        sites: the differences of each quantized value, in graph order; empty if reading them would change the run.
        nodes: what the runtime executes; ``None`` if it executes the file as it is.
        latency_ms: median of one run; ``None`` if not measured.
        float_latency_ms: median of one run of the float export in the same runtime, measured in turns with the file.
        refusal: the runtime's message if it does not run the file.
        unseen_sites: the number of sites in the bodies of loops, whose values no runtime returns.
        ops: the differences of each site and output where each op is given the reference values of its inputs; ``None``
            if that was not run.
        slowest: the ops that take most of the time, or more than in float; empty if it was not measured.
    """

    way: str
    runtime: str
    total: Difference | None = None
    top1: float | None = None
    outputs: tuple[Difference, ...] = ()
    sites: tuple[Difference, ...] = ()
    nodes: RuntimeNodes | None = None
    latency_ms: float | None = None
    float_latency_ms: float | None = None
    refusal: str | None = None
    unseen_sites: int = 0
    ops: tuple[Difference, ...] | None = None
    slowest: tuple[OpTime, ...] = ()

    @property
    def differing(self) -> float:
        """Share of the output values that are not bit-equal; NaN if the runtime refuses the file."""
        return math.nan if self.total is None else self.total.differing

    @property
    def max_difference(self) -> float:
        """The largest ``|runtime - simulation|`` of all outputs; NaN if the runtime refuses the file."""
        return math.nan if self.total is None else self.total.max_difference

    @property
    def max_difference_scales(self) -> float | None:
        """The largest, in scales of the output's quantizer; ``None`` without one."""
        return None if self.total is None else self.total.max_steps

    @property
    def sqnr_db(self) -> float:
        """SQNR of the outputs against the simulation; NaN if the runtime refuses the file."""
        return math.nan if self.total is None else self.total.sqnr_db

    @property
    def least(self) -> Difference:
        """The output with the least SQNR. Raises: ValueError if the runtime refuses the file."""
        if self.total is None:
            raise ValueError(f"{self.runtime} refuses the file: {self.refusal}")
        return min(self.outputs or [self.total], key=lambda output: output.sqnr_db)

    @property
    def first_departure(self) -> Difference | None:
        """The first site, in graph order, with a value that is not the simulation's."""
        return next((site for site in self.sites if site.differing), None)

    def to_json(self) -> dict[str, object]:
        """Every field."""
        return {
            "way": self.way, "runtime": self.runtime, "refusal": self.refusal, "top1": self.top1,
            "total": None if self.total is None else self.total.to_json(),
            "outputs": [output.to_json() for output in self.outputs],
            "sites": [site.to_json() for site in self.sites], "unseen_sites": self.unseen_sites,
            "ops": None if self.ops is None else [op.to_json() for op in self.ops],
            "slowest": [op.to_json() for op in self.slowest],
            "nodes": None if self.nodes is None else self.nodes.to_json(),
            "latency_ms": self.latency_ms, "float_latency_ms": self.float_latency_ms,
        }


@dataclass(frozen=True)
class Verdict:
    """What runtimes compute of an exported file, compared with the simulation; printable.

    Args:
        path: the file, or the directory of the files of several islands.
        reference: what the runs are compared with, in words.
        runs: the ways in which the file was run, first with the optimizations off.
        findings: what is wrong or worth knowing, and what to do.
        size_bytes: size of the file with its external data.
        float_size_bytes: size of the float export; ``None`` if there is none.
        islands: the verdict on each file, if there are several.
        timing: what the latencies are of; ``None`` if they were not measured.
    """

    path: Path
    reference: str
    runs: tuple[FileRun, ...]
    findings: tuple[Finding, ...]
    size_bytes: int
    float_size_bytes: int | None = None
    islands: tuple[Verdict, ...] = ()
    timing: Timing | None = None

    @property
    def level(self) -> Level:
        """The most serious finding."""
        levels = {finding.level for finding in self.findings}
        return next((level for level in (Level.RED, Level.YELLOW) if level in levels), Level.GREEN)

    @property
    def exact(self) -> FileRun:
        """ONNX Runtime without graph optimizations: each operator computes what ONNX defines."""
        return self.run(OFF)

    @property
    def optimized(self) -> FileRun:
        """ONNX Runtime as it comes, with its default optimizations."""
        return self.run(ON)

    def run(self, way: str) -> FileRun:
        """The run of this way. Raises: KeyError if there is none."""
        found = {run.way: run for run in self.runs}
        return found[way]

    def to_json(self) -> dict[str, object]:
        """Everything in the verdict, for a file."""
        return {
            "format": "qtk.verdict", "version": 1, "level": self.level.value, "path": str(self.path),
            "reference": self.reference, "timing": None if self.timing is None else self.timing.to_json(),
            "size_bytes": self.size_bytes, "float_size_bytes": self.float_size_bytes,
            "findings": [
                {"level": each.level.value, "cause": each.cause, "remedy": each.remedy} for each in self.findings
            ],
            "runs": [run.to_json() for run in self.runs],
            "islands": [island.to_json() for island in self.islands],
        }

    def tables(self) -> list[Table]:
        """The runs; the slowest ops; outputs if there are several; the sites that differ; the nodes in float."""
        tables = [self._runs()]
        tables += [slowest_table(run.slowest, self.timing) for run in self.runs if run.slowest]
        if any(run.outputs[1:] for run in self.runs):
            tables.append(_differences("outputs", {run.way: run.outputs for run in self.runs}))
        sites = {run.way: tuple(site for site in run.sites if site.differing) for run in self.runs}
        if any(sites.values()):
            tables.append(_differences("sites that differ, in graph order", sites))
        nodes = next((run.nodes for run in self.runs if run.way == ON), None)
        if nodes is not None and nodes.floats:
            tables.append(nodes.float_table())
        return tables

    def summary(self) -> list[str]:
        """Colour, the first reason, accuracy, size and latency: at most five lines."""
        lines = [f"{self.path}: {self.level.value}, compared with {self.reference}"]
        if self.findings:
            more = f" (and {len(self.findings) - 1} more below)" if self.findings[1:] else ""
            lines.append(f"why: {self.findings[0].cause}{more}")
        run = next((run for run in self.runs if run.way == ON and run.total is not None), self.runs[0])
        if run.total is not None:
            lines.append(f"accuracy, {run.way}: {_accuracy(run)}")
        lines.append(f"size: {self.size_bytes:,} bytes" + (
            f", {self.size_bytes / self.float_size_bytes:.3f} of float's" if self.float_size_bytes else ""))
        if run.latency_ms is not None:
            beside = "" if not run.float_latency_ms else (
                f", {run.latency_ms / run.float_latency_ms:.2f} × float ({_milliseconds(run.float_latency_ms)} ms)")
            lines.append(f"latency: {_milliseconds(run.latency_ms)} ms{beside}"
                         f"{'' if self.timing is None else f', {self.timing}'}")
        return lines

    def lines(self) -> list[str]:
        """Integer nodes, the first tensors to depart, and the findings, a line each."""
        lines = [f"{run.way}: integer nodes: {run.nodes.integers()}" for run in self.runs if run.nodes is not None]
        for run in self.runs:
            first = run.first_departure
            if first is not None:
                steps = _steps(first.max_steps)
                lines.append(f"{run.way}: the first tensor to depart is {first.name}: {_share(first.differing)} of its "
                             f"values, by at most {steps} step{'s' * (steps != '1')}")
        unseen = max(run.unseen_sites for run in self.runs)
        if unseen:
            lines.append(f"{unseen} sites inside loops are compared by what comes out of the loops")
        lines += [f"{run.way}: {run.refusal}" for run in self.runs if run.refusal is not None]
        return [*lines, *map(str, self.findings)]

    def __str__(self) -> str:
        parts = ["\n".join(self.summary())]
        parts += [table.text() for table in self.tables()]
        parts.append("\n".join(self.lines()))
        return "\n\n".join([*parts, *map(str, self.islands)])

    def _runs(self) -> Table:
        headings = ("top-1 equal", "differing", "> 1 step", "largest, steps", "SQNR, dB", "integer nodes",
                    "float nodes", "latency, ms", "float, ms")
        rows = tuple((run.runtime, *_cells(run)) for run in self.runs)
        columns = (Column("runtime"), *(Column(heading, number=True) for heading in headings))
        title = f"against {self.reference}{'' if self.timing is None else f'; latency of {self.timing}'}"
        return Table(title, columns, rows)


def _accuracy(run: FileRun) -> str:
    assert run.total is not None
    parts = [] if run.top1 is None else [f"{_share(run.top1)} of top-1 equal"]
    if run.total.beyond_one_step is not None:
        parts.append(f"{_share(run.total.beyond_one_step)} of the outputs off by more than one step")
    of = f" of {run.least.name}, the least of {len(run.outputs)} outputs" if run.outputs[1:] else ""
    return ", ".join([*parts, f"SQNR {_decibels(run.least.sqnr_db)} dB{of}"])


def _cells(run: FileRun) -> tuple[str, ...]:
    if run.total is None:
        return ("refused", *[NOTHING] * 8)
    nodes = run.nodes
    return (
        _share(run.top1), _share(run.total.differing), _share(run.total.beyond_one_step), _steps(run.total.max_steps),
        _decibels(run.total.sqnr_db),
        NOTHING if nodes is None else str(sum(nodes.integer.values())),
        NOTHING if nodes is None else str(len(nodes.floats)),
        _milliseconds(run.latency_ms), _milliseconds(run.float_latency_ms),
    )


def _differences(title: str, by_way: dict[str, tuple[Difference, ...]]) -> Table:
    headings = ("differing", "> 1 step", "largest, steps", "SQNR, dB")
    columns = (Column("run"), Column("tensor"), *(Column(heading, number=True) for heading in headings))
    rows: list[tuple[str, ...]] = []
    sections = []
    for way, differences in by_way.items():
        sections.append(len(rows))
        rows += [
            (way, each.name, _share(each.differing), _share(each.beyond_one_step), _steps(each.max_steps),
             _decibels(each.sqnr_db))
            for each in differences
        ]
    return Table(title, columns, tuple(rows), tuple(sections[1:]))


def _share(value: float | None) -> str:
    if value is None:
        return NOTHING
    return "<0.01%" if 0 < value < 0.00005 else f"{value:.2%}"


def _steps(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.4g}"


def _decibels(value: float) -> str:
    return "∞" if value == math.inf else NOTHING if math.isnan(value) else f"{value:.1f}"


def _milliseconds(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.3g}"
