"""Draws docs/pictures/simulation.svg: a site, its quantizer, scheme and encoding, and the file.

Run by ``python docs/pictures/draw_simulation.py``.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

WIDTH, HEIGHT = 900, 515
BLUE, GREEN, ORANGE, GREY = "#dbe7ff", "#dcf5e3", "#ffe8cc", "#eeeeee"
INK = "#1d2733"


def box(x: int, y: int, width: int, title: str, note: str = "", fill: str = GREY, height: int = 56) -> str:
    """A rounded box with a title and a line below it; (x, y) is its upper left corner."""
    middle = x + width // 2
    lines = [f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="{fill}" stroke="{INK}"/>']
    lines.append(text(middle, y + (24 if note else height // 2 + 5), title, bold=True))
    if note:
        lines.append(text(middle, y + 43, note, size=12))
    return "\n".join(lines)


def text(x: int, y: int, content: str, *, size: int = 14, bold: bool = False, anchor: str = "middle") -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}"{weight}>{escape(content)}</text>'


def arrow(*points: tuple[int, int], dashed: bool = False) -> str:
    path = " L".join(f"{x},{y}" for x, y in points)
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<path d="M{path}" fill="none" stroke="{INK}" stroke-width="1.5" marker-end="url(#head)"{dash}/>'


def drawing() -> str:
    """The picture as SVG: the model above, calibration in the middle, the exported file below."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" fill="{INK}">',
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0,0 L8,4 L0,8 z" fill="{INK}"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text(16, 28, "sim.model", bold=True, anchor="start"),
        box(40, 60, 150, "quantizer", "site conv1.weight", BLUE), arrow((190, 88), (250, 88)),
        box(250, 60, 110, "conv1", "op of the model"), arrow((360, 88), (420, 88)),
        box(420, 60, 150, "quantizer", "site conv1:out", BLUE), arrow((570, 88), (630, 88)),
        box(630, 60, 110, "conv2", "op of the model"), arrow((740, 88), (790, 88)), text(808, 93, "…"),
        text(225, 185, "compute_encodings(batches)", bold=True, anchor="start"),
        arrow((395, 88), (395, 160), (125, 160), (125, 205), dashed=True),
        box(40, 205, 170, "observer", "extremes, histogram", GREEN), arrow((210, 233), (250, 233)),
        box(250, 205, 170, "scheme", "min_max, mse, entropy", GREEN), arrow((420, 233), (460, 233)),
        box(460, 205, 190, "encoding", "scale, zero point, format", ORANGE),
        arrow((555, 205), (555, 150), (495, 150), (495, 118)),
        text(16, 318, "export(directory)", bold=True, anchor="start"),
        arrow((555, 261), (555, 305)),
        box(430, 305, 250, "initializers", "scale and zero point of the encoding", ORANGE),
        arrow((495, 361), (495, 405)), arrow((625, 361), (625, 405)),
        box(250, 405, 110, "Conv", "node of the file"), arrow((360, 433), (410, 433)),
        box(410, 405, 140, "QuantizeLinear", "float → codes", BLUE), arrow((550, 433), (580, 433)),
        box(580, 405, 160, "DequantizeLinear", "codes → float", BLUE), arrow((740, 433), (775, 433)),
        box(775, 405, 110, "Conv", "node of the file"),
        text(450, 495, "Quantizer and nodes compute the same: "
             "(clamp(round(x / scale) + zero point) − zero point) · scale", size=13),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("simulation.svg").write_text(drawing(), encoding="utf-8")
