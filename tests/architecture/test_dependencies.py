"""pyproject.toml declares the packages that qtk imports, and no others."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from tests.architecture.test_floors import MODULES, imports_of

PROJECT = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8")
MODULE_OF = {"pyyaml": "yaml", "scikit-learn": "sklearn", "coreai-core": "coreai"}
"""Distributions whose module has another name."""

WITH_TORCH = {"setuptools", "triton"}
"""What PyTorch installs, Triton where it can be used."""

BY_NAME = {"timm", "transformers"}
"""What is imported under a name that the user gives: ``timm:resnet18``, ``hf:FOLDER``."""

LOWERINGS = {"torchao", "executorch"}
"""What lowers an exported program; users import it."""

TOOLS = {"dev", "docs", "all"}
"""Extras of those who work on qtk itself."""


def imported(modules: Mapping[str, tuple[str, str]]) -> set[str]:
    """Top-level packages that are neither ours nor Python's."""
    packages = {found.target.partition(".")[0] for found in imports_of(modules) if not found.dots}
    return packages - {"qtk"} - sys.stdlib_module_names


def declared(project: str) -> set[str]:
    """Modules of the dependencies and of the extras that users choose."""
    (core,) = re.findall(r"^dependencies = \[(.*?)\]", project, flags=re.MULTILINE | re.DOTALL)
    (section,) = re.findall(r"^\[project.optional-dependencies\]\n(.*?)^\[", project, flags=re.MULTILINE | re.DOTALL)
    extras = dict(re.findall(r"^(\w+) = \[(.*?)\]", section, flags=re.MULTILINE | re.DOTALL))
    return _modules([core, *(names for extra, names in extras.items() if extra not in TOOLS)])


def _modules(lists: Iterable[str]) -> set[str]:
    names = {name.lower() for names in lists for name in re.findall(r'"([\w-]+)', names)}
    return {MODULE_OF.get(name, name.replace("-", "_")) for name in names}


@pytest.mark.medium
def test_what_is_imported_is_declared_and_the_reverse() -> None:
    assert imported(MODULES) - WITH_TORCH | BY_NAME | LOWERINGS == declared(PROJECT)


@pytest.mark.slow
def test_a_planted_import_is_found() -> None:
    planted = {**MODULES, "qtk.a": ("a.py", "def f():\n    import matplotlib.pyplot")}
    assert imported(planted) - imported(MODULES) == {"matplotlib"}


def test_a_planted_extra_is_found() -> None:
    section = "[project.optional-dependencies]\n"
    planted = PROJECT.replace(section, section + 'plots = ["matplotlib>=3"]\n')
    assert declared(planted) - declared(PROJECT) == {"matplotlib"}
