"""What the README shows, runs: every python block by itself, as pasted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks
from tests.docs.short_digits import digits_of

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = blocks(README, "python")


@pytest.mark.medium
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_python_block_runs_as_pasted(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    with digits_of(pytestconfig):
        exec(compile(BLOCKS[number], f"README.md, block {number}", "exec"), {"__name__": "__main__"})


def test_there_is_something_to_run() -> None:
    assert BLOCKS
