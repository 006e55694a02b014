"""The pages of docs/ and the blocks of code in them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md"))


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language.

    >>> blocks("```sh\\nqtk targets\\n```\\n", "sh")
    ['qtk targets\\n']
    """
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def languages(text: str) -> list[str]:
    """What is written behind the opening fence of every block; empty for none."""
    return re.findall(r"^```(.*)\n(?:.*\n)*?```$", text, flags=re.MULTILINE)
