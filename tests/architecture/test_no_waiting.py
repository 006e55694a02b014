"""What waits for an accelerator stands in few places of the rooms that work on every batch, each for a reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

QTK = Path(__file__).resolve().parents[2] / "qtk"
ROOMS = ("ops", "kernels", "nn", "quantizers", "observers", "numerics")
READS = {"item", "tolist", "nonzero", "cpu", "numpy", "argwhere", "masked_select"}
ALLOWED = {
    ("quantizers/flags.py", "item"): "when a state is loaded",
    ("observers/extremes.py", "bool"): "on the CPU, and at the end of a calibration",
    ("observers/extremes.py", "nonzero"): "in an error, on the CPU",
    ("observers/extremes.py", "tolist"): "in an error, on the CPU",
    ("observers/first_batch_histogram.py", "bool"): "in the first batch, whose range decides the bins",
    ("observers/histogram.py", "bool"): "on the CPU",
    ("numerics/ranges.py", "bool"): "at the end of a calibration",
    ("numerics/ranges.py", "nonzero"): "in an error",
    ("numerics/ranges.py", "tolist"): "in an error",
}


def waits(source: str) -> Iterator[str]:
    """Names of the calls that read a tensor's numbers: methods, and ``bool`` of anything that is computed."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        match node.func:
            case ast.Attribute(attr=name) if name in READS:
                yield name
            case ast.Name(id="bool") if any(_reduces(part) for part in ast.walk(node)):
                yield "bool"


def _reduces(node: ast.AST) -> bool:
    is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return (is_method and node.func.attr in ("any", "all", "isnan")) or (  # type: ignore[union-attr]
        isinstance(node, ast.Attribute) and node.attr == "_broken"
    )


def test_the_rule_finds_what_it_is_for():
    assert list(waits("x.item(); x.sum().tolist(); bool((x > 0).any()); bool(names); x.nonzero(as_tuple=True)")) == [
        "item", "tolist", "bool", "nonzero"
    ]


def test_nothing_waits_but_where_it_may():
    found = set()
    for room in ROOMS:
        for path in (QTK / room).rglob("*.py"):
            found |= {(str(path.relative_to(QTK)), name) for name in waits(path.read_text(encoding="utf-8"))}
    assert found - {*ALLOWED} == set(), "waits for an accelerator"
    assert {*ALLOWED} - found == set(), "is allowed and not there"
