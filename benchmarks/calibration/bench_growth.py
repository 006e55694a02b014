"""Times calibration against the number of batches, layers, channels and tokens, and draws docs/pictures/growth.svg.

CPU seconds of ``compute_encodings`` at W8A8, the median of three, one thread. A line of slope 1 in the logarithmic
picture is a time that grows as the data do; where it is flatter, a fixed part shows.

    python benchmarks/calibration/bench_growth.py --csv benchmarks/results/growth.csv
    python benchmarks/calibration/bench_growth.py --csv benchmarks/results/growth.csv --draw-only
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
import warnings
from collections.abc import Callable
from math import log10
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from drawing import legend, page, text

import qtk

PICTURE = Path(__file__).parents[2] / "docs/pictures/growth.svg"
FIELDS = ("along", "size", "scheme", "CPU s")
SCHEMES = {"min_max": "#2f6fde", "percentile": "#1d9a4b", "mse": "#d9822b", "tf_enhanced": "#8e44ad"}
WIDTH, REPEATS = 128, 3
PANEL, TOP, BOTTOM = 215, 40, 240


def layers(count: int) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(count)))


def filters(channels: int) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Conv2d(channels, channels, 3, groups=channels), nn.ReLU())
                           for _ in range(4)))


Case = tuple[nn.Module, list[Tensor]]
CASES: dict[str, tuple[Callable[[int], Case], tuple[int, ...]]] = {
    "batches": (lambda size: (layers(4), list(torch.randn(size, 64, WIDTH))), (1, 4, 16, 64, 256)),
    "layers": (lambda size: (layers(size), list(torch.randn(8, 64, WIDTH))), (2, 8, 32, 128)),
    "channels": (lambda size: (filters(size), list(torch.randn(4, 4, size, 16, 16))), (16, 64, 256, 1024)),
    "tokens": (lambda size: (layers(4), list(torch.randn(4, 1, size, WIDTH))), (64, 256, 1024, 4096, 16384)),
}
"""What grows → the model and its batches, and the sizes."""


def measured(along: str, size: int, scheme: str) -> float:
    torch.manual_seed(0)
    model, batches = CASES[along][0](size)
    sim = qtk.QuantSim(model.eval(), batches[0], scheme=scheme)
    seconds = []
    for _ in range(REPEATS + 1):  # the first one warms up
        begun = time.process_time()
        sim.compute_encodings(batches, progress=False)
        seconds.append(time.process_time() - begun)
    return median(seconds[1:])


def panel(left: int, along: str, curves: dict[str, dict[int, float]], lowest: float, decades: float) -> list[str]:
    sizes = CASES[along][1]

    def x_of(size: int) -> float:
        return left + 25 + log10(size / sizes[0]) / log10(sizes[-1] / sizes[0]) * (PANEL - 50)

    def y_of(seconds: float) -> float:
        return BOTTOM - (log10(seconds) - lowest) / decades * (BOTTOM - TOP)

    parts = [text(left + PANEL / 2, 26, along, size=14)]
    for decade in range(int(decades) + 1):
        y = y_of(10.0 ** (lowest + decade))
        parts.append(f'<path d="M{left + 15},{y:.0f} H{left + PANEL - 15}" stroke="#d5d9df"/>')
        parts.append(text(left + 12, y + 4, f"{10.0 ** (lowest + decade):g}", size=11, anchor="end"))
    parts += [text(x_of(size), BOTTOM + 18, f"{size}", size=11) for size in sizes]
    for scheme, curve in curves.items():
        points = " L".join(f"{x_of(size):.1f},{y_of(seconds):.1f}" for size, seconds in curve.items())
        parts.append(f'<path d="M{points}" fill="none" stroke="{SCHEMES[scheme]}" stroke-width="2"/>')
    return parts


def drawing(rows: list[dict[str, str]]) -> str:
    """The picture as SVG: a panel for what grows, a curve a scheme."""
    curves: dict[str, dict[str, dict[int, float]]] = {}
    for row in rows:
        curves.setdefault(row["along"], {}).setdefault(row["scheme"], {})[int(row["size"])] = float(row["CPU s"])
    logarithms = [log10(float(row["CPU s"])) for row in rows]
    lowest = float(min(logarithms) // 1)
    decades = float(-(-max(logarithms) // 1)) - lowest
    width = 40 + (PANEL + 10) * len(curves)
    parts = page(width, 300, "s")
    for place, (along, own) in enumerate(curves.items()):
        parts += panel(35 + (PANEL + 10) * place, along, own, lowest, decades)
    return "\n".join([*parts, *legend(SCHEMES, 280), "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--draw-only", action="store_true", help="draw what the file holds")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if not arguments.draw_only:
        with arguments.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(FIELDS)
            for along, (_, sizes) in CASES.items():
                for size in sizes:
                    for scheme in SCHEMES:
                        row = along, size, scheme, f"{measured(along, size, scheme):.4g}"
                        print(*row, flush=True)
                        writer.writerow(row)
    with arguments.csv.open(newline="", encoding="utf-8") as file:
        PICTURE.write_text(drawing(list(csv.DictReader(file))), encoding="utf-8")


if __name__ == "__main__":
    main()
