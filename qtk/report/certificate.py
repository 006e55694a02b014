"""A certificate of exported files: what each runtime computes of which bytes, by which versions, on which CPU."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from qtk.errors import ExportError, first_line
from qtk.report.table import Column, Table
from qtk.report.verdict import NOTHING, FileRun, Level

FORMAT, VERSION = "qtk.certificate", 1

NAME = "certificate.json"
"""The file beside the certified files."""

LEAST_DB = -300.0
"""What stands for outputs that are nothing but noise, infinite or not a number."""

WORSE_DB, WORSE_SHARE = 1.0, 0.001
"""A run is worse than its certificate by more than this in SQNR, or in the share of values over one step."""

_ORDER = {level.value: position for position, level in enumerate(Level)}


@dataclass(frozen=True, slots=True)
class CertifiedRun:
    """A file in one way of a runtime.

    Args:
        file: name of the file.
        way: the way, as in a verdict.
        runtime: the runtime, its version and its settings.
        level: green, yellow or red: the verdict on the file in this runtime.
        top1: share of equal argmax; ``None`` without one.
        other_codes: share of the values that are off by more than half a step, 0…1.
        beyond_one_step: share of the values that are off by more than one step, 0…1.
        max_steps: the largest difference, in steps.
        sqnr_db: SQNR against the reference; ``None`` if all are equal.
        first: the first quantized tensor with a value that is not the reference's; ``None`` if that is not known.
        integer_nodes: operators in integers; ``None`` if the runtime does not say.
        float_nodes: operators in float.
        latency_ms: median of one run; ``None`` if not measured.
        float_latency_ms: of the float file.
        refusal: why the runtime does not run the file.
    """

    file: str
    way: str
    runtime: str
    level: str
    top1: float | None = None
    other_codes: float | None = None
    beyond_one_step: float | None = None
    max_steps: float | None = None
    sqnr_db: float | None = None
    first: str | None = None
    integer_nodes: int | None = None
    float_nodes: int | None = None
    latency_ms: float | None = None
    float_latency_ms: float | None = None
    refusal: str | None = None

    @classmethod
    def of(cls, file: str, run: FileRun, level: Level) -> CertifiedRun:
        """Returns what a certificate says of a run."""
        total, nodes, first = run.total, run.nodes, run.first_departure
        return cls(
            file, run.way, run.runtime, level.value, run.top1,
            None if total is None else total.other_codes, None if total is None else total.beyond_one_step,
            None if total is None else total.max_steps,
            None if total is None or total.sqnr_db == math.inf else max(round(total.sqnr_db, 2), LEAST_DB),
            None if first is None else first.name,
            None if nodes is None else sum(nodes.integer.values()), None if nodes is None else len(nodes.floats),
            run.latency_ms, run.float_latency_ms, run.refusal,
        )


@dataclass(frozen=True)
class Certificate:
    """What runtimes compute of the files of a directory.

    Args:
        reference: what the runs are compared with, in words.
        inputs: SHA-256 of the inputs.
        files: name → SHA-256 of its bytes.
        versions: package → version.
        cpu: ``model``, the name of the processor; ``flags``, its instruction sets of integers; ``threads``.
        runs: the runs.
        findings: what the verdicts found, and what to do, a line each.
        absent: title of a runtime → the package that it lacks here.
    """

    reference: str
    inputs: str
    files: Mapping[str, str]
    versions: Mapping[str, str]
    cpu: Mapping[str, str]
    runs: tuple[CertifiedRun, ...]
    findings: tuple[str, ...]
    absent: Mapping[str, str]

    @property
    def level(self) -> Level:
        """The most serious level."""
        return max((Level(run.level) for run in self.runs), key=lambda level: _ORDER[level.value], default=Level.GREEN)

    def to_json(self) -> dict[str, object]:
        """Everything, for a file."""
        return {"format": FORMAT, "version": VERSION, "level": self.level.value, **asdict(self)}

    @classmethod
    def load(cls, path: Path) -> Certificate:
        """The certificate in a file. Raises: ExportError if there is none."""
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            if value["format"] != FORMAT or value["version"] != VERSION:
                raise ValueError(f"it is {value['format']} {value['version']}")
            kept = {each.name: value[each.name] for each in fields(cls)}
            return cls(**kept | {
                "runs": tuple(CertifiedRun(**run) for run in value["runs"]), "findings": tuple(value["findings"])})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ExportError(f"{path} is no certificate of version {VERSION}: {first_line(error)}; write one with "
                              "qtk verify --all") from error

    def table(self) -> Table:
        """A row for each run."""
        headings = ("top-1 equal", "> 0 steps", "> 1 step", "largest", "SQNR, dB", "integer", "float", "ms",
                    "float, ms")
        columns = (Column("file"), Column("runtime"), Column("verdict"),
                   *(Column(heading, number=True) for heading in headings), Column("first to depart"))
        rows = tuple((run.file, run.runtime, run.level, *_cells(run)) for run in self.runs)
        return Table(f"against {self.reference}", columns, rows)

    def changes(self, now: Certificate) -> tuple[list[str], list[str]]:
        """Returns what is worse now than this certificate says, and what is only other: a sentence each.

        >>> before = Certificate("ONNX", "a", {"m.onnx": "1"}, {"torch": "2.14"}, {}, (), (), {})
        >>> now = Certificate("ONNX", "a", {"m.onnx": "2"}, {"torch": "2.15"}, {}, (), (), {})
        >>> before.changes(now)
        (['m.onnx has other bytes than were certified'], ['torch was 2.14 and is 2.15'])
        """
        worse = self.changed_files(now.files)
        other = [f"{name} was {value} and is {after.get(name, 'missing')}"
                 for before, after in ((self.versions, now.versions), (self.cpu, now.cpu))
                 for name, value in before.items() if after.get(name) != value]
        if self.inputs != now.inputs:
            other.append("the inputs are not the inputs of the certificate")
        found = {(run.file, run.way): run for run in now.runs}
        for run in self.runs:
            after = found.get((run.file, run.way))
            if after is None:
                worse.append(f"{run.file} was not run by {run.runtime}, which is missing here")
            else:
                worse += [f"{run.file} in {after.runtime}: {what}" for what in _worse(run, after)]
        return worse, other

    def changed_files(self, files: Mapping[str, str]) -> list[str]:
        """Returns what is not as certified of ``files``, name → SHA-256: a sentence each."""
        missing = [f"{name} is missing" for name in self.files if name not in files]
        changed = [f"{name} has other bytes than were certified" for name, digest in self.files.items()
                   if files.get(name, digest) != digest]
        return [*missing, *changed, *(f"{name} is not certified" for name in files if name not in self.files)]


def _worse(before: CertifiedRun, now: CertifiedRun) -> list[str]:
    found = []
    if _ORDER[now.level] > _ORDER[before.level]:
        found.append(f"the verdict was {before.level} and is {now.level}")
    if now.refusal is not None and before.refusal is None:
        found.append(f"refused: {now.refusal}")
    elif now.sqnr_db is not None and (before.sqnr_db is None or now.sqnr_db < before.sqnr_db - WORSE_DB):
        was = "equal" if before.sqnr_db is None else f"{before.sqnr_db:.1f} dB"
        if before.refusal is None:
            found.append(f"the outputs were {was} and are {now.sqnr_db:.1f} dB from the reference")
    if (now.beyond_one_step or 0) > (before.beyond_one_step or 0) + WORSE_SHARE:
        found.append(f"{now.beyond_one_step:.2%} of the values are over one step, "
                     f"{before.beyond_one_step or 0:.2%} were")
    if (now.float_nodes or 0) > (before.float_nodes or 0) and before.float_nodes is not None:
        found.append(f"{now.float_nodes} operators are in float, {before.float_nodes} were")
    return found


def _cells(run: CertifiedRun) -> tuple[str, ...]:
    if run.refusal is not None:
        return ("refused", *[NOTHING] * 8, run.refusal)
    shares = (NOTHING if each is None else f"{each:.2%}" for each in (run.top1, run.other_codes, run.beyond_one_step))
    counts = (NOTHING if each is None else str(each) for each in (run.integer_nodes, run.float_nodes))
    times = (NOTHING if each is None else f"{each:.3g}" for each in (run.latency_ms, run.float_latency_ms))
    return (*shares, NOTHING if run.max_steps is None else f"{run.max_steps:.3g}",
            "∞" if run.sqnr_db is None else f"{run.sqnr_db:.1f}", *counts, *times, run.first or NOTHING)
