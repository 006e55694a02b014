"""Names from torch's private parts go through ``qtk/torch_private.py`` alone."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping

import pytest

from qtk.torch_private import MODULE_TABLES
from tests.architecture.test_floors import ROOT, nodes_of, read_package

DOOR = "qtk.torch_private"
ALLOWED = {*MODULE_TABLES, "_apply"}
"""Attributes of a module that every subclass of it may use."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def imported_privately(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """``import torch._x`` and ``from torch.a import _b``, ``from torch._x import b``."""
    for node in nodes:
        match node:
            case ast.Import(names):
                full = [alias.name for alias in names]
            case ast.ImportFrom(str(module), names):
                full = [f"{module}.{alias.name}" for alias in names]
            case _:
                continue
        for name in full:
            root, *parts = name.split(".")
            if root == "torch" and any(is_private(part) for part in parts):
                yield node.lineno, name


def defined(modules: Iterable[Iterable[ast.AST]]) -> set[str]:
    """Private names that the package gives to its own functions and attributes."""
    names: set[str] = set()
    for nodes in modules:
        for node in nodes:
            match node:
                case ast.FunctionDef(name) | ast.ClassDef(name):
                    names.add(name)
                case ast.Attribute(ast.Name("self"), name, ast.Store()):
                    names.add(name)
    return names


def reached_privately(nodes: Iterable[ast.AST], own: set[str]) -> Iterator[tuple[int, str]]:
    """``torch._x``, ``graph._codegen`` and ``getattr(op, "_schema")``; names of ATen ops (``_to_copy``) are public."""
    for node in nodes:
        match node:
            case ast.Attribute(value, name) if is_private(name):
                base = ast.unparse(value)
                foreign = base not in ("self", "cls", "super()") and name not in {*own, *ALLOWED}
                if foreign and not base.startswith("torch.ops."):
                    yield node.lineno, ast.unparse(node)
            case ast.Call(ast.Name("getattr" | "setattr" | "hasattr"), [_, ast.Constant(str(name)), *_]):
                if is_private(name) and name not in {*own, *ALLOWED}:
                    yield node.lineno, ast.unparse(node)


def private_names(modules: Mapping[str, tuple[str, str]]) -> list[str]:
    """One line for every private name of torch outside the door."""
    nodes = {name: nodes_of(source) for name, (_, source) in modules.items()}
    own = defined(nodes.values())
    return [
        f"{modules[name][0]}:{line}: {found} is private to torch; take it from {DOOR}"
        for name, each in nodes.items() if name != DOOR
        for line, found in (*imported_privately(each), *reached_privately(each, own))
    ]


@pytest.mark.medium
def test_private_names_of_torch_go_through_one_file() -> None:
    assert private_names(read_package(ROOT)) == []


@pytest.mark.parametrize(
    ("planted", "complaint"),
    [
        ("import torch._dynamo", "torch._dynamo"),
        ("def f():\n    from torch.utils import _pytree as pytree", "a.py:2: torch.utils._pytree"),
        ("from torch._subclasses.fake_tensor import FakeTensorMode", "torch._subclasses"),
        ("import torch\nx = torch._C.whatever()", "torch._C"),
        ("def f(graph):\n    return graph._codegen", "graph._codegen"),
        ("def f(op):\n    return getattr(op, '_schema', None)", "'_schema'"),
    ],
)
def test_a_planted_name_is_found(planted: str, complaint: str) -> None:
    (fault,) = private_names({"qtk.core.a": ("a.py", planted)})
    assert complaint in fault


@pytest.mark.parametrize(
    "allowed",
    [
        "from torch import __version__",
        "class A:\n    def __init__(self, other):\n        self._x = other._x",
        "def f(module):\n    return module._modules",
        "import torch\nx = torch.ops.aten._to_copy.default",
    ],
)
def test_what_is_no_private_name_of_torch_is_let_through(allowed: str) -> None:
    assert private_names({"qtk.core.a": ("a.py", allowed)}) == []
