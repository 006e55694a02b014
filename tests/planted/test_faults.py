"""Each fault still has its line: what the suite finds can be counted only then."""

from pathlib import Path

import pytest

from tests.planted.faults import FAULTS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_its_line_stands_once_in_the_source(fault):
    assert fault.planted((ROOT / fault.file).read_text(encoding="utf-8"))
