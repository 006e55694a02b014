"""The walk in CONTRIBUTING.md names files and functions that exist, in at most 25 stops."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_STOPS = 25


def stops(name: str) -> list[tuple[int, str, str]]:
    """Number, file and definition of every stop of a walk."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.split(f"<!-- walk:{name} -->")[1].split("<!-- walk:")[0]
    return [(int(n), path, made) for n, path, made in re.findall(r"^(\d+)\. `(\S+)` `(\w+)`", section, re.MULTILINE)]


@pytest.mark.parametrize("name", ["weight", "activation"])
def test_every_stop_is_there(name: str) -> None:
    walk = stops(name)
    assert 1 <= len(walk) <= MOST_STOPS
    assert [number for number, _, _ in walk] == list(range(1, len(walk) + 1))
    missing = []
    for number, path, made in walk:
        body = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
        names = {node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        if made not in names:
            missing.append(f"{number}. {path} has no {made}")
    assert missing == []
