"""Thins a matrix of settings over all backends together, so that the file of each backend runs a share of the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from tests.pairwise import full, pairwise


def matrix(**axes: Iterable[object]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Parametrizes a method of ``OneBackend`` as ``pytest.mark.pairwise`` does; one axis is ``backend``."""

    def with_axes(test: Callable[..., None]) -> Callable[..., None]:
        test.axes = axes
        return test

    return with_axes


class OneBackend:
    """The tests of one backend; each method with a ``matrix`` runs the rows of ``backend``, without this column."""

    backend: str

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        axes = getattr(metafunc.function, "axes", None)
        if axes is None:
            return
        chosen = (full if metafunc.config.getoption("door") == "all" else pairwise)(axes.values())
        rows = (dict(zip(axes, row, strict=True)) for row in chosen)
        own = [row for row in rows if row.pop("backend") == self.backend]
        ids = ["-".join(map(str, row.values())) for row in own]
        metafunc.parametrize([name for name in axes if name != "backend"], [[*row.values()] for row in own], ids=ids)
