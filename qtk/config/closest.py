"""A hint at the nearest known names, for lists too long to print whole."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from qtk.registry import nearest

FEW = 12


def closest(name: str, known: Iterable[str]) -> str:
    """Up to three close names; all of them if there are few.

    >>> closest("rleu", [*"abcdefghijklm", "relu", "relu6"])
    "did you mean 'relu' or 'relu6'?"
    """
    names = sorted(known)
    if len(names) <= FEW:
        return nearest(name, names)
    close = difflib.get_close_matches(name, names, n=3)
    return f"did you mean {' or '.join(map(repr, close))}?" if close else f"there are {len(names)}, none of them close"
