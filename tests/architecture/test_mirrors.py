"""``qtk/a/b.py`` is tested by ``tests/a/test_b.py``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def untested(files: Iterable[str], tests: Mapping[str, str]) -> list[str]:
    """The files of qtk whose test file is missing or holds no test. ``tests``: path below tests/ → source."""
    mirrors = {file: str(Path(file).with_name(f"test_{Path(file).name}")) for file in files}
    return [file for file, mirror in mirrors.items() if not re.search("def test_|class Test", tests.get(mirror, ""))]


def test_every_file_has_its_test() -> None:
    files = [str(path.relative_to(ROOT / "qtk")) for path in sorted((ROOT / "qtk").rglob("*.py"))]
    tests = {
        str(path.relative_to(ROOT / "tests")): path.read_text(encoding="utf-8")
        for path in (ROOT / "tests").rglob("test_*.py")
    }
    assert untested([file for file in files if not file.endswith("__init__.py")], tests) == []


@pytest.mark.parametrize(("tests", "found"), [
    ({}, ["a/b.py"]),
    ({"a/test_b.py": "def test_it(): pass"}, []),
    ({"a/test_b.py": ""}, ["a/b.py"]),
    ({"test_b.py": "def test_it(): pass"}, ["a/b.py"]),
])
def test_a_planted_gap_is_found(tests: dict[str, str], found: list[str]) -> None:
    assert untested(["a/b.py"], tests) == found
