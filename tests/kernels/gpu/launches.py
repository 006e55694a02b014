"""Which kernels a test launches."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from qtk.kernels.gpu import launch


def recorded(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> list[str]:
    """The names of the kernels that the modules launch from now on, in order."""
    names: list[str] = []
    launched = launch.run

    def run(kernel: Any, *given: Any, **constants: Any) -> object:
        names.append(kernel.fn.__name__)
        return launched(kernel, *given, **constants)

    for module in (launch, *modules):
        monkeypatch.setattr(module, "run", run)
    monkeypatch.setattr(launch, "_REPEATABLE", {})
    monkeypatch.setattr(launch.Call, "is_aligned", False)  # nothing is repeated without a call of run
    return names
