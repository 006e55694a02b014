"""Small pictures as SVG, whose colours are the page's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 300, 84


@dataclass(frozen=True, slots=True)
class HistogramChart:
    """How often values occur, and the range that is quantized.

    Args:
        lowest: left edge of the first bin.
        highest: right edge of the last.
        counts: of bins of equal width.
        range: the smallest and the largest value that codes stand for; ``None`` if it is another for each tensor.
    """

    lowest: float
    highest: float
    counts: tuple[int, ...]
    range: tuple[float, float] | None


def histogram_svg(histogram: HistogramChart) -> str:
    """Bars on a logarithmic scale; what lies outside of the range is marked, and the range is a line below.

    >>> svg = histogram_svg(HistogramChart(-1.0, 1.0, (1, 10, 0, 2), (-0.5, 0.5)))
    >>> svg.count("<rect"), svg.count('class="clipped"')
    (3, 2)
    """
    low, high = histogram.lowest, histogram.highest
    if histogram.range is not None:
        low, high = min(low, histogram.range[0]), max(high, histogram.range[1])
    span = (high - low) or 1.0
    width = (histogram.highest - histogram.lowest) / max(len(histogram.counts), 1)
    most = math.log1p(max(histogram.counts, default=0)) or 1.0
    parts = []
    for index, count in enumerate(histogram.counts):
        if count:
            left = histogram.lowest + index * width
            tall = (HEIGHT - 14) * math.log1p(count) / most
            middle = left + width / 2
            outside = histogram.range is not None and not histogram.range[0] <= middle <= histogram.range[1]
            kind, wide = "clipped" if outside else "bar", max(WIDTH * width / span, 0.6)
            parts.append(f'<rect class="{kind}" x="{WIDTH * (left - low) / span:.1f}" y="{HEIGHT - 12 - tall:.1f}" '
                         f'width="{wide:.1f}" height="{tall:.1f}"/>')
    if histogram.range is not None:
        left, right = (WIDTH * (edge - low) / span for edge in histogram.range)
        parts.append(f'<path class="range" d="M{left:.1f} {HEIGHT - 12}v6H{right:.1f}v-6"/>')
    return _picture(parts, f"values from {histogram.lowest:.4g} to {histogram.highest:.4g}")


def channels_svg(lowest: Sequence[float], highest: Sequence[float], limit: Sequence[float]) -> str:
    """The extent of each channel's values, and what its codes stand for.

    Args:
        lowest: the smallest value of each channel.
        highest: the largest.
        limit: the largest magnitude that its codes stand for.

    >>> channels_svg([-1.0], [2.0], [2.0]).count("<rect")
    2
    """
    most = max((abs(value) for values in (lowest, highest, limit) for value in values), default=0.0) or 1.0
    wide, half = WIDTH / max(len(lowest), 1), HEIGHT / 2
    parts = []
    for index, (low, high, edge) in enumerate(zip(lowest, highest, limit, strict=True)):
        for kind, top, bottom in (("grid", edge, -edge), ("bar", high, low)):
            parts.append(f'<rect class="{kind}" x="{index * wide:.2f}" y="{half - half * top / most:.1f}" '
                         f'width="{max(wide * 0.8, 0.4):.2f}" height="{max(half * (top - bottom) / most, 0.5):.1f}"/>')
    return _picture(parts, f"{len(lowest)} channels")


def curve_svg(values: Sequence[float]) -> str:
    """A line through values, evenly spaced, from the lowest at the bottom to the highest at the top; inf is there too.

    >>> 'd="M0.0 80.0L150.0 4.0L300.0 42.0"' in curve_svg([30.0, 40.0, 35.0])
    True
    """
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    span, wide = (high - low) or 1.0, WIDTH / max(len(values) - 1, 1)
    points = [f"{index * wide:.1f} {HEIGHT - 4 - (HEIGHT - 8) * (min(value, high) - low) / span:.1f}"
              for index, value in enumerate(values)]
    return _picture([f'<path class="curve" d="M{"L".join(points)}"/>'], f"{len(values)} steps, {low:.1f} to {high:.1f}")


def _picture(parts: Sequence[str], title: str) -> str:
    return (f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" preserveAspectRatio="none"><title>{title}</title>'
            f'{"".join(parts)}</svg>')
