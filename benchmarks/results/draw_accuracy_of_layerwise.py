"""Draws accuracy_of_layerwise.svg from accuracy_of_layerwise.csv: wrong test images against bits of weights.

Run by ``python benchmarks/results/draw_accuracy_of_layerwise.py``.
"""

from __future__ import annotations

import csv
import sys
from math import log10
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from drawing import legend, page, text

FOLDER = Path(__file__).parent
WIDTH, HEIGHT, PANEL, TOP, BOTTOM = 900, 300, 200, 40, 240
COLOURS = {"plain rounding": "#8a8f98", "SeqMSE": "#2f6fde", "GPTQ": "#1d9a4b", "AdaRound": "#d9822b",
           "SeqMSE + GPTQ + bias correction": "#8e44ad"}
WIDTHS = ("W4A8", "W3A8", "W2A8")


def height_of(error: float) -> float:
    """The y of an error in %, on a logarithmic axis from 0.1 to 100."""
    return BOTTOM - (log10(error) + 1) / 3 * (BOTTOM - TOP)


def panel(left: int, model: str, curves: dict[str, list[float]]) -> list[str]:
    places = [left + 30 + 65 * step for step in range(len(WIDTHS))]
    parts = [text(left + 95, 26, model, size=14)]
    for error in (0.1, 1, 10, 100):
        y = height_of(error)
        parts.append(f'<path d="M{left + 15},{y:.0f} H{left + 180}" stroke="#d5d9df"/>')
        parts.append(text(left + 10, y + 4, f"{error:g}", size=11, anchor="end"))
    parts += [text(x, BOTTOM + 18, width) for x, width in zip(places, WIDTHS, strict=True)]
    for method, errors in curves.items():
        points = " L".join(f"{x},{height_of(error):.1f}" for x, error in zip(places, errors, strict=True))
        parts.append(f'<path d="M{points}" fill="none" stroke="{COLOURS[method]}" stroke-width="2"/>')
    return parts


def drawing() -> str:
    """The picture as SVG: a panel a model, a curve a method."""
    with (FOLDER / "accuracy_of_layerwise.csv").open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["method"] in COLOURS]
    models: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        models.setdefault(row["model (float)"], {})[row["method"]] = [100 - float(row[width]) for width in WIDTHS]
    parts = page(WIDTH, HEIGHT, "wrong, %")
    for place, (model, curves) in enumerate(models.items()):
        parts += panel(45 + (PANEL + 10) * place, model, curves)
    return "\n".join([*parts, *legend(COLOURS, 280), "</svg>"]) + "\n"


if __name__ == "__main__":
    (FOLDER / "accuracy_of_layerwise.svg").write_text(drawing(), encoding="utf-8")
