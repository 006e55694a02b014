"""A name that is not taken yet."""

from __future__ import annotations

from collections.abc import Container


def free_name(name: str, taken: Container[object], mark: str = "_") -> str:
    """``name``, or ``name`` with the first ordinal after ``mark`` that is not ``taken``.

    >>> free_name("relu", {"relu", "relu_1"}), free_name("relu", {"relu"}, "@"), free_name("relu", ())
    ('relu_2', 'relu@1', 'relu')
    """
    free, ordinal = name, 0
    while free in taken:
        ordinal += 1
        free = f"{name}{mark}{ordinal}"
    return free
