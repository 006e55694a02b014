"""The scores of a run: one for each model and setting."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from qtk.report.table import Column, Table

FLOAT = "fp32"
"""Name of the float setting, which the others are compared with."""

NOTHING = "–"

SUMMARY_JSON, SUMMARY_TXT = "summary.json", "summary.txt"
"""Files of a run's results, beside the folders of its models."""


@dataclass(frozen=True, slots=True)
class Score:
    """One model in one setting.

    Args:
        value: value of the metric; top-1 as a share, 0…1.
        sqnr_db: SQNR of the outputs against the float model's; ``None`` for float itself, and for outputs that are no
            floats.
        size_bytes: size of the exported ONNX file with its external data; ``None`` if there is none.
        onnxruntime_value: value of the metric for the exported file; ``None`` if there is none.
        onnxruntime_agreement: share of predictions, 0…1, where the file agrees with the simulation; ``None`` where
            the outputs are no predictions.
        runtime: how the exported file ran, in words; ``None`` if there is none.
    """

    value: float
    sqnr_db: float | None
    size_bytes: int | None = None
    onnxruntime_value: float | None = None
    onnxruntime_agreement: float | None = None
    runtime: str | None = None


@dataclass(frozen=True)
class Summary:
    """Scores by model and setting.

    Args:
        metric: name of the metric in ``Score.value``: ``top1`` or a user's.
        models: model → setting → score, in the order of the run.
        failures: model → setting → why it has no score.
        measured_on: the data of accuracy, error and agreement, in words; empty where it is not known.
    """

    metric: str
    models: Mapping[str, Mapping[str, Score]]
    failures: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    measured_on: str = ""

    def to_json(self) -> dict[str, object]:
        """``models.<model>.<setting>`` with a key for each number measured, or ``error``.

        Numbers that are not finite are null, for JSON has none.
        """
        names = dict.fromkeys((*self.models, *self.failures))
        return {
            "metric": self.metric,
            **({"measured_on": self.measured_on} if self.measured_on else {}),
            "models": {
                model: self._records(self.models.get(model, {}), self.failures.get(model, {})) for model in names
            },
        }

    def table(self) -> Table:
        """One row for each score."""
        shown = "top-1" if self.metric == "top1" else self.metric
        columns = (
            Column("model"), Column("setting"),
            *(Column(heading, number=True) for heading in
              (shown, "SQNR, dB", "size, bytes", f"ONNX Runtime {shown}", "agreement")),
        )
        rows: list[tuple[str, ...]] = []
        sections = []
        for model, scores in self.models.items():
            sections.append(len(rows))
            for setting, score in scores.items():
                rows.append((
                    model, self._setting(setting),
                    self._value(score.value), _shown_db(score.sqnr_db), _bytes(score.size_bytes),
                    self._value(score.onnxruntime_value), _share(score.onnxruntime_agreement),
                ))
        on = f" on {self.measured_on}" if self.measured_on else ""
        return Table(f"accuracy and error{on}, and size", columns, tuple(rows), tuple(sections[1:]))

    def runtimes(self) -> str:
        """Says how the exported files ran: in one line if all ran the same way, else in a line per description."""
        files: dict[str, list[str]] = {}
        for model, scores in self.models.items():
            for setting, score in scores.items():
                if score.runtime is not None:
                    files.setdefault(score.runtime, []).append(f"{model} {self._setting(setting)}")
        if len(files) == 1:
            return next(iter(files))
        return "\n".join(f"{', '.join(names)}: {runtime}" for runtime, names in files.items())

    def failed(self) -> str:
        """One line for each setting without a score."""
        return "\n".join(f"{model} {self._setting(setting)} failed: {error}"
                         for model, errors in self.failures.items() for setting, error in errors.items())

    def text(self) -> str:
        """The table, and below it how the exported files ran, and what failed."""
        return "\n\n".join(part for part in (self.table().text(), self.runtimes(), self.failed()) if part)

    def _records(self, scores: Mapping[str, Score], failures: Mapping[str, str]) -> dict[str, object]:
        records = {setting: self._record(score) for setting, score in scores.items()}
        return {
            setting: {**records.get(setting, {}), **({"error": failures[setting]} if setting in failures else {})}
            for setting in dict.fromkeys((*records, *failures))
        }

    def _record(self, score: Score) -> dict[str, float | str | None]:
        record: dict[str, float | str | None] = {
            self.metric: _finite(score.value), "sqnr_db": _finite(score.sqnr_db), "size_bytes": score.size_bytes
        }
        if score.onnxruntime_value is not None:
            record[f"onnxruntime_{self.metric}"] = _finite(score.onnxruntime_value)
            record["onnxruntime_agreement"] = _finite(score.onnxruntime_agreement)
            record["runtime"] = score.runtime
        return record

    def _value(self, value: float | None) -> str:
        if value is None:
            return NOTHING
        return _share(value) if self.metric == "top1" else f"{value:.6g}"

    @staticmethod
    def _setting(name: str) -> str:
        """``w8a8`` is shown as ``W8A8``."""
        return name.upper() if name.replace("w", "").replace("a", "").isdigit() else name


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2%}"


def _shown_db(value: float | None) -> str:
    return NOTHING if value is None else "∞" if value == math.inf else f"{value:.1f}"


def _bytes(value: int | None) -> str:
    return NOTHING if value is None else f"{value:,}"
