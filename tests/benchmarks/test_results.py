"""RESULTS.md stays short, and what it names exists."""

import csv
import re
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
RESULTS = (BENCHMARKS / "RESULTS.md").read_text(encoding="utf-8")
TABLES = sorted((BENCHMARKS / "results").glob("*.csv"))


def test_the_results_are_short():
    assert RESULTS.count("\n") <= 300
    long = [line for line in RESULTS.splitlines() if len(line) > 160 and not line.startswith("|")]
    assert not long


def test_every_command_and_link_leads_to_a_file():
    commands = re.findall(r"python ([\w/]+\.py)", RESULTS)
    links = re.findall(r"\]\(([^)]+)\)", RESULTS)
    assert len(commands) > 30
    files = [BENCHMARKS.parent / name for name in commands]
    files += [BENCHMARKS / name for name in links if not name.startswith("http")]
    assert [file for file in files if not file.exists()] == []


@pytest.mark.parametrize("table", TABLES, ids=[table.stem for table in TABLES])
def test_every_line_of_a_table_has_as_many_cells_as_its_heading(table):
    with table.open(newline="", encoding="utf-8") as file:
        heading, *rows = csv.reader(file)
    assert all(heading)
    assert len(set(heading)) == len(heading)
    assert rows
    assert {len(row) for row in rows} == {len(heading)}
