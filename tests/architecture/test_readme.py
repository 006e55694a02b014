"""What the README shows, runs: every python block in a fresh interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import blocks as blocks_of

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return blocks_of(README, language)


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_python_block_runs_as_pasted(number: int, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    shown = subprocess.run(
        [sys.executable, "-c", blocks("python")[number]],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )
    assert shown.returncode == 0, shown.stderr


def test_there_is_something_to_run() -> None:
    assert blocks("python")
