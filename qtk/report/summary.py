"""What a run measured: one score for each model and setting."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from qtk.report.table import Column, Table

FLOAT = "fp32"
"""The setting that the others are compared with."""

NOTHING = "–"


@dataclass(frozen=True, slots=True)
class Score:
    """One model in one setting.

    Args:
        value: of the evaluation; top-1 as a share, 0…1.
        sqnr_db: of the outputs against those in float; ``None`` for float itself.
        size_bytes: codes packed at their width, scales, zero points, and the rest in float.
        onnxruntime_value: the evaluation of the exported file; ``None`` if there is none.
        onnxruntime_agreement: share of predictions, 0…1, where the file agrees with the simulation.
    """

    value: float
    sqnr_db: float | None
    size_bytes: int
    onnxruntime_value: float | None = None
    onnxruntime_agreement: float | None = None


@dataclass(frozen=True)
class Summary:
    """Scores by model and setting.

    Args:
        metric: what ``Score.value`` is, ``top1`` or the name of the evaluation.
        models: model → setting → score, as they ran.
    """

    metric: str
    models: Mapping[str, Mapping[str, Score]]

    def to_json(self) -> dict[str, object]:
        """``models.<model>.<setting>`` with a key for each number measured; an infinite SQNR is null, as in JSON."""
        return {
            "metric": self.metric,
            "models": {
                model: {setting: self._record(score) for setting, score in scores.items()}
                for model, scores in self.models.items()
            },
        }

    def table(self) -> Table:
        """One row for each score."""
        shown = "top-1" if self.metric == "top1" else self.metric
        columns = (
            Column("model"), Column("setting"),
            *(Column(heading, number=True) for heading in
              (shown, "SQNR dB", "bytes", f"ONNX Runtime {shown}", "agreement")),
        )
        rows: list[tuple[str, ...]] = []
        sections = []
        for model, scores in self.models.items():
            sections.append(len(rows))
            for setting, score in scores.items():
                rows.append((
                    model, setting.upper() if self._is_code(setting) else setting,
                    self._value(score.value), _shown_db(score.sqnr_db), f"{score.size_bytes:,}",
                    self._value(score.onnxruntime_value), _share(score.onnxruntime_agreement),
                ))
        return Table("accuracy, error and size", columns, tuple(rows), tuple(sections[1:]))

    def _record(self, score: Score) -> dict[str, float | None]:
        record: dict[str, float | None] = {
            self.metric: score.value, "sqnr_db": _finite(score.sqnr_db), "size_bytes": score.size_bytes
        }
        if score.onnxruntime_value is not None:
            record[f"onnxruntime_{self.metric}"] = score.onnxruntime_value
            record["onnxruntime_agreement"] = score.onnxruntime_agreement
        return record

    def _value(self, value: float | None) -> str:
        if value is None:
            return NOTHING
        return _share(value) if self.metric == "top1" else f"{value:.6g}"

    @staticmethod
    def _is_code(setting: str) -> bool:
        """``w8a8`` is shown as ``W8A8``."""
        return setting.replace("w", "").replace("a", "").isdigit()


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2%}"


def _shown_db(value: float | None) -> str:
    return NOTHING if value is None else "∞" if value == math.inf else f"{value:.1f}"
