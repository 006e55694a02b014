"""The public names that are loaded when used are there for ``dir``, for type checkers and for ``import *``."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest

import qtk

BODY = ast.parse(Path(qtk.__file__).read_text(encoding="utf-8")).body


def shown_to_type_checkers() -> dict[str, str]:
    """Name → module of the imports under TYPE_CHECKING."""
    (block,) = (each for each in BODY if isinstance(each, ast.If) and ast.unparse(each.test) == "TYPE_CHECKING")
    return {alias.name: str(each.module) for each in block.body if isinstance(each, ast.ImportFrom)
            for alias in each.names}


def test_type_checkers_see_what_is_loaded() -> None:
    assert shown_to_type_checkers() == qtk._MODULE_OF


@pytest.mark.parametrize("name", qtk._MODULE_OF)
def test_a_name_is_what_its_module_defines(name: str) -> None:
    assert getattr(qtk, name) is getattr(import_module(qtk._MODULE_OF[name]), name)


def test_all_names_are_listed_and_there() -> None:
    scope: dict[str, object] = {}
    exec("from qtk import *", scope)
    assert set(qtk.__all__) <= scope.keys() & set(dir(qtk))
    assert set(qtk._MODULE_OF) <= set(qtk.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'qtk' has no attribute 'quantise'"):
        qtk.quantise  # noqa: B018
