"""Matrices of settings, thinned so that every two values of two settings still meet.

A fault that shows with one value, or with two values of two settings together, shows in the thin matrix; what only
three together show needs the full one. ``@pytest.mark.pairwise(shape=SHAPES, dtype=DTYPES, layout=LAYOUTS)``
parametrizes a test with the thin matrix where slow tests are left out, with the full one where they run (conftest).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

Row = tuple[object, ...]


def pairwise(axes: Iterable[Iterable[object]]) -> list[Row]:
    """Rows with one value of each axis; every two values of two axes stand together in some row.

    Greedy, and the same every time: each row begins with a pair that is missing and takes, axis by axis, the value
    that brings most missing pairs with it.

    >>> pairwise(["ab", "xy", [1, 2]])
    [('a', 'x', 1), ('a', 'y', 2), ('b', 'x', 2), ('b', 'y', 1)]
    """
    values = [list(axis) for axis in axes]
    if len(values) < 2:
        return list(itertools.product(*values))
    missing = {  # a dict keeps an order
        ((i, a), (j, b)): None
        for i, j in itertools.combinations(range(len(values)), 2)
        for a in range(len(values[i])) for b in range(len(values[j]))
    }
    rows = []
    while missing:
        row = dict(next(iter(missing)))
        for axis in sorted(set(range(len(values))) - set(row)):
            row[axis] = max(range(len(values[axis])), key=lambda own: sum(
                pair in missing for pair in _pairs({**row, axis: own})
            ))
        for pair in _pairs(row):
            missing.pop(pair, None)
        rows.append(tuple(values[axis][row[axis]] for axis in range(len(values))))
    return rows


def full(axes: Iterable[Iterable[object]]) -> list[Row]:
    return list(itertools.product(*axes))


def _pairs(row: dict[int, int]) -> Sequence[tuple[tuple[int, int], tuple[int, int]]]:
    return list(itertools.combinations(sorted(row.items()), 2))
