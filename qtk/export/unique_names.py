"""Names that nothing else has yet."""

from __future__ import annotations

from collections.abc import Container, Iterable


def unique(names: Iterable[str]) -> list[str]:
    """The names, a repeated one with the first suffix ``_1``, ``_2``, … that is not in use.

    >>> unique(["x", "output", "x"])
    ['x', 'output', 'x_1']
    """
    given: list[str] = []
    for name in names:
        given.append(free_name(name, given))
    return given


def free_name(name: str, taken: Container[str]) -> str:
    """``name``, or ``name`` with the first suffix ``_1``, ``_2``, … that is not ``taken``."""
    free, ordinal = name, 0
    while free in taken:
        ordinal += 1
        free = f"{name}_{ordinal}"
    return free
