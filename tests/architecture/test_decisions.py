"""Decisions stand beside the code they decide, in ``qtk/<room>/DECISIONS.md``, numbered so that code can cite them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = {path.parent.name: path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("qtk/*/DECISIONS.md"))}
MOST_WORDS = 6_000
CITING = ("*.md", "docs/*.md", "benchmarks/**/*.py", "benchmarks/*.md", "configs/**/*.yaml", "csrc/*", "qtk/**/*.py",
          "qtk/*/DECISIONS.md")
DECISION = re.compile(r"\*\*D-([a-z]+)-(\d+)\. [^*]+[.]\*\*(?:\s|$)")


def faults(room: str, text: str) -> Iterator[str]:
    """Paragraphs of a page, behind its heading, that are not the decision ``D-room-n`` whose turn it is."""
    heading, *paragraphs = text.strip().split("\n\n")
    if not heading.startswith("# "):
        yield f"{heading!r} is no heading"
    number = 0
    for paragraph in paragraphs:
        found = DECISION.match(paragraph)
        if found is None and number == 0:
            continue  # the introduction
        number += 1
        if found is None or found.groups() != (room, str(number)):
            yield f"expected **D-{room}-{number}. A sentence.** and its reason, got {paragraph[:60]!r}"


def test_decisions_are_numbered_one_after_the_other() -> None:
    assert [fault for room, text in ROOMS.items() for fault in faults(room, text)] == []


def test_a_room_has_five_decisions_or_joins_its_neighbour() -> None:
    assert [room for room, text in ROOMS.items() if f"D-{room}-5." not in text] == []


def test_decisions_stay_short() -> None:
    assert sum(len(text.split()) for text in ROOMS.values()) <= MOST_WORDS, "drop what a docstring says, or history"


def test_every_decision_that_is_cited_exists() -> None:
    decided = {f"D-{room}-{number}" for text in ROOMS.values() for room, number in DECISION.findall(text)}
    files = {path for pattern in CITING for path in ROOT.glob(pattern)}
    cited = {(path, name) for path in files
             for name in re.findall(r"\bD-[a-z]+-\d+\b", path.read_text(encoding="utf-8"))}
    assert sorted(f"{path.relative_to(ROOT)}: {name}" for path, name in cited if name not in decided) == []


def test_every_file_that_a_decision_names_exists() -> None:
    named = {(room, name) for room, text in ROOMS.items() for name in re.findall(r"[\w/]+/\w+\.py\b", text)}
    assert sorted((room, name) for room, name in named
                  if not (ROOT / name).is_file() and not (ROOT / "qtk" / name).is_file()) == []


def test_the_page_lists_every_room() -> None:
    page = (ROOT / "docs" / "decisions.md").read_text(encoding="utf-8")
    assert re.findall(r"`qtk/(\w+)/DECISIONS\.md`", page) == list(ROOMS)


@pytest.mark.parametrize("text", [
    "# Decisions\n\n**D-a-2. It is so.** Why.", "# Decisions\n\n**D-b-1. It is so.** Why.",
    "# Decisions\n\n**D-a-1. It is so.** Why.\n\nAn aside.",
    "# Decisions\n\n**D-a-1. It is so.** Why.\n\n**D-a-3. So.**",
])
def test_a_planted_fault_is_found(text: str) -> None:
    assert list(faults("a", text))
    assert not list(faults("a", "# Decisions\n\nOf a.\n\n**D-a-1. It is so.** Why.\n\n**D-a-2. So too.**"))
