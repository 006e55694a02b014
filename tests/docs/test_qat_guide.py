"""The tests that the table of the guide to training names are there."""

from __future__ import annotations

import re

from tests.docs.pages import DOCS, ROOT

TABLE = (DOCS / "qat.md").read_text(encoding="utf-8").partition("## What trainers do")[2]
ROWS = re.findall(r"^\| (?!what \||---)(.*) \| (.*) \| (.*) \|$", TABLE, re.MULTILINE)


def test_the_table_names_tests_that_exist():
    assert len(ROWS) > 30
    for what, _, tests in ROWS:
        named = re.findall(r"`(\w+): (\w+)`", tests)
        assert named, what
        for file, test in named:
            texts = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob(f"test_{file}.py")]
            assert any(f"\ndef test_{test}(" in text for text in texts), (what, file, test)
