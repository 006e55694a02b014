"""Pictures are what their scripts draw."""

import runpy
from pathlib import Path

import pytest

from tests.docs.pages import DOCS

SCRIPTS = sorted([*DOCS.glob("pictures/draw_*.py"), *DOCS.parent.glob("benchmarks/results/draw_*.py")])


@pytest.mark.parametrize("script", SCRIPTS, ids=[path.stem for path in SCRIPTS])
def test_a_picture_is_what_its_script_draws(script: Path) -> None:
    picture = script.with_name(script.stem.removeprefix("draw_") + ".svg")
    assert picture.read_text(encoding="utf-8") == runpy.run_path(str(script))["drawing"]()
