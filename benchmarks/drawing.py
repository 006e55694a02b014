"""What the drawings of results are made of."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

INK = "#1d2733"


def text(x: float, y: float, content: str, *, size: int = 12, anchor: str = "middle") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" text-anchor="{anchor}">{escape(content)}</text>'


def page(width: int, height: int, unit: str) -> list[str]:
    """The beginning of a drawing, with the unit of its upright axes."""
    return [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
            f'fill="{INK}">', f'<rect width="{width}" height="{height}" fill="white"/>',
            text(16, 16, unit, anchor="start")]


def legend(colours: Mapping[str, str], y: int) -> list[str]:
    """A line of the names of curves."""
    parts, x = [], 60
    for name, colour in colours.items():
        parts.append(f'<path d="M{x},{y} h24" stroke="{colour}" stroke-width="3"/>')
        parts.append(text(x + 30, y + 4, name, anchor="start"))
        x += 60 + 8 * len(name)
    return parts
