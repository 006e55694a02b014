"""Which kernels a test launches."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from qtk.kernels.gpu import launch


def recorded(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> list[str]:
    """The names of the kernels that the modules launch from now on, in order."""
    names: list[str] = []

    def run(kernel: Any, *given: Any, **constants: Any) -> None:
        names.append(kernel.fn.__name__)
        launch.run(kernel, *given, **constants)

    for module in modules:
        monkeypatch.setattr(module, "run", run)
    return names
