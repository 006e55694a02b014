"""The house stands: imports only go down, no cycles, small files, and ``import qtk`` is light."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

FLOORS: tuple[tuple[str, ...], ...] = (  # lowest first; an import goes down, or stays inside its package
    ("errors",),
    ("registry", "torch_private", "public", "atomic"),
    ("nn",),
    ("core",),
    ("config", "numerics", "report"),
    ("kernels",),
    ("ops",),
    ("observers", "algorithms"),
    ("quantizers", "calibrators"),
    ("operators",),
    ("graph",),
    ("calls",),
    ("capture", "moments"),
    ("channels", "data", "export", "planning"),
    ("aimet", "layerwise", "training", "transforms"),
    ("analysis",),
    ("calibration", "runtimes"),
    ("workflow",),
    ("quantsim",),
    ("auto",),
    ("demo",),
    ("cli",),
    ("__main__",),
)
HEIGHT = {package: height for height, floor in enumerate(FLOORS) for package in floor}
MAX_LINES = 400
NO_NOUN = {"utils", "util", "helpers", "helper", "common", "misc"}
BANNED = ("torch.ao", "torch.onnx._internal", "torch.quantization")
LAST_NAMES = {name.rpartition(".")[2] for name in BANNED}
ALLOWED = ("torch.ao.quantization.fx._decomposed", "torch.onnx._internal.exporter._registration")
"""Ops that torch's lowerings read, and the translations that its exporter parses; torch_private alone loads them."""
HEAVY = {"triton", "onnx", "onnxruntime", "onnxscript", "torchvision", "timm", "rich", "typer", "matplotlib", "sklearn",
         "sympy"}

MOST_MODULES = 220
"""Modules of qtk that ``import qtk`` loads."""

OUTSIDE = ("qtk.auto", "qtk.cli", "qtk.demo", "qtk.layerwise", "qtk.export", "qtk.report.page", "qtk.algorithms",
           "qtk.config.aimet", "qtk.kernels.gpu", "qtk.workflow.export", "qtk.workflow.verify_export")
"""What lies outside the inner boundary: loaded by the name or the method that needs it."""


@dataclass(frozen=True)
class Import:
    """Module ``importer`` imports module ``target``; ``dots`` counts those of a relative import."""

    importer: str
    target: str
    place: str
    dots: int = 0

    def __str__(self) -> str:
        return f"{self.place}: {self.importer} imports {self.target}"


def read_package(root: Path) -> dict[str, tuple[str, str]]:
    """Module name → (path shown in messages, source)."""
    modules = {}
    for path in sorted((root / "qtk").rglob("*.py")):
        shown = path.relative_to(root)
        parts = shown.with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules[name] = (str(shown), path.read_text(encoding="utf-8"))
    return modules


@functools.cache
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    """All nodes of a source, which several tests read and none changes."""
    return tuple(ast.walk(ast.parse(source)))


def imports_of(modules: Mapping[str, tuple[str, str]]) -> Iterator[Import]:
    """Every import: at the top, inside functions, under TYPE_CHECKING, and by ``import_module("literal")``.

    ``from a import b`` imports module ``a.b`` where there is one, else ``a``.
    """
    for importer, (path, source) in modules.items():
        for node in nodes_of(source):
            place = f"{path}:{getattr(node, 'lineno', 0)}"
            match node:
                case ast.Import(names):
                    for alias in names:
                        yield Import(importer, alias.name, place)
                case ast.ImportFrom(module, names, dots):
                    for alias in names:
                        full = f"{module}.{alias.name}"
                        outside = module is not None and not module.startswith("qtk")
                        yield Import(importer, full if full in modules or outside else str(module), place, dots or 0)
                case ast.Call(
                    func=ast.Name("import_module" | "__import__") | ast.Attribute(attr="import_module"),
                    args=[ast.Constant(str(target)), *_],
                ):
                    yield Import(importer, target, place)


def package_of(module: str) -> str:
    """``qtk.graph.flow`` → ``graph``; the root itself → ``""``."""
    return [*module.split("."), ""][1]


def floor_faults(modules: Mapping[str, tuple[str, str]]) -> list[str]:
    """One line for every import that breaks the house rules."""
    faults = []
    for name, (path, _) in modules.items():
        if package_of(name) not in {*HEIGHT, ""}:
            faults.append(f"{path}:1: {package_of(name)!r} stands on no floor; give it one in FLOORS")
    for found in imports_of(modules):
        if found.dots:
            faults.append(f"{found.place}: relative import; write the whole name")
            continue
        allowed = found.importer == "qtk.torch_private" and found.target in ALLOWED
        if found.target.startswith(BANNED) and not allowed:
            faults.append(f"{found}, which is banned")
        if found.target != "qtk" and not found.target.startswith("qtk."):
            continue
        upper, lower = package_of(found.importer), package_of(found.target)
        if upper == "":
            continue  # the root is the public surface: it looks at everything
        if lower == "":
            faults.append(f"{found}: nothing inside imports the root")
        elif upper != lower and upper in HEIGHT and lower in HEIGHT:
            if HEIGHT[lower] == HEIGHT[upper]:
                faults.append(f"{found}: {upper} and {lower} share a floor and must not know each other")
            elif HEIGHT[lower] > HEIGHT[upper]:
                faults.append(f"{found}: {lower} stands above {upper}")
    return faults


def cycle(modules: Mapping[str, tuple[str, str]]) -> list[str]:
    """The modules of one import cycle, with the places of its imports; empty if there is none."""
    below: dict[str, set[str]] = {name: set() for name in modules}
    places: dict[tuple[str, str], str] = {}
    for found in imports_of(modules):
        if found.target in modules and found.target != found.importer:
            below[found.importer].add(found.target)
            places[found.importer, found.target] = str(found)
    try:
        TopologicalSorter(below).prepare()
    except CycleError as error:
        loop = error.args[1][::-1]
        return [places[pair] for pair in pairwise(loop)]
    return []


def attribute_faults(modules: Mapping[str, tuple[str, str]]) -> list[str]:
    """Banned names reached as attributes: ``torch.ao.quantization`` without an import."""
    return [
        f"{path}:{node.lineno}: uses {ast.unparse(node)}, which is banned"
        for path, source in modules.values()
        for node in nodes_of(source)
        if isinstance(node, ast.Attribute) and node.attr in LAST_NAMES and ast.unparse(node) in BANNED
    ]


def fx_faults(modules: Mapping[str, tuple[str, str]]) -> list[str]:
    """Modules below ``operators`` that name ``torch.fx``: down there nobody sees a node."""
    faults = []
    for found in imports_of(modules):
        package = package_of(found.importer)
        below = package in HEIGHT and HEIGHT[package] < HEIGHT["operators"] and package != "torch_private"
        if below and found.target.startswith("torch.fx"):
            faults.append(f"{found}: {package} stands below operators and sees no torch.fx node")
    return faults


MODULES = read_package(ROOT)


@pytest.mark.medium
def test_imports_only_go_down() -> None:
    assert floor_faults(MODULES) == []


@pytest.mark.medium
def test_nobody_below_operators_sees_torch_fx() -> None:
    assert fx_faults(MODULES) == []
    planted = {"qtk.observers.a": ("a.py", "from torch import fx"), "qtk.planning.b": ("b.py", "from torch import fx")}
    assert [fault.partition(":")[0] for fault in fx_faults(planted)] == ["a.py"]


@pytest.mark.medium
def test_no_import_cycle() -> None:
    assert cycle(MODULES) == []


@pytest.mark.medium
def test_no_banned_attribute() -> None:
    assert attribute_faults(MODULES) == []


def test_files_are_small_and_named_after_a_noun() -> None:
    faults = defaultdict(list)
    for name, (path, source) in MODULES.items():
        if (lines := source.count("\n")) > MAX_LINES:
            faults[path].append(f"{lines} lines, more than {MAX_LINES}; split it by noun")
        if NO_NOUN & set(name.split(".")):
            faults[path].append("its name says nothing; name it after the noun it holds")
    assert dict(faults) == {}


def test_inits_are_thin() -> None:
    for folder in {path.parent for path in (ROOT / "qtk").rglob("*.py")} - {ROOT / "qtk"}:
        init = folder / "__init__.py"
        assert init.exists(), f"{init.relative_to(ROOT)} is missing, so the folder stays out of the wheel"
        body = ast.parse(init.read_text(encoding="utf-8")).body
        assert len(body) == 1, f"{init.relative_to(ROOT)}: an __init__ holds a docstring and nothing else"


@pytest.mark.medium
def test_import_is_light() -> None:
    program = (
        "import sys, torch; before = set(sys.modules); import qtk; qtk.QuantSim; "
        "print(*set(sys.modules) - before, sep='\\n'); "
        "print('CUDA!' if torch.cuda.is_initialized() else '')"
    )
    shown = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    loaded = set(shown.stdout.split())
    assert not {name.partition(".")[0] for name in loaded} & {*HEAVY, "CUDA!"}
    ours = {name for name in loaded if name.partition(".")[0] == "qtk"}
    assert "qtk.quantsim" in ours
    assert sorted(name for name in ours if name.startswith(OUTSIDE)) == []
    assert len(ours) <= MOST_MODULES


@pytest.mark.parametrize(
    ("planted", "complaint"),
    [
        ({"qtk.core.a": "from qtk.graph.b import c"}, "qtk/core/a.py:1: qtk.core.a imports qtk.graph.b: graph stands"),
        ({"qtk.core.a": "def f():\n    import qtk.graph.b"}, "qtk/core/a.py:2"),
        ({"qtk.core.a": "import importlib\nimportlib.import_module('qtk.cli.app')"}, "qtk/core/a.py:2"),
        ({"qtk.transforms.a": "from qtk.layerwise import b", "qtk.layerwise.b": ""}, "share a floor"),
        ({"qtk.core.a": "from . import b"}, "relative import"),
        ({"qtk.core.a": "from .b import c"}, "relative import"),
        ({"qtk.core.a": "import qtk"}, "nothing inside imports the root"),
        ({"qtk.core.a": "from qtk import QuantSim"}, "nothing inside imports the root"),
        ({"qtk.core.a": "from torch import ao"}, "banned"),
        ({"qtk.core.a": "import torch.onnx._internal.exporter"}, "banned"),
        ({"qtk.attic.a": ""}, "stands on no floor"),
    ],
)
def test_a_planted_fault_is_found(planted: dict[str, str], complaint: str) -> None:
    (fault,) = floor_faults({name: (name.replace(".", "/") + ".py", source) for name, source in planted.items()})
    assert complaint in fault


def test_a_planted_cycle_is_found() -> None:
    loop = {
        "qtk.core.a": ("a.py", "import qtk.core.b"),
        "qtk.core.b": ("b.py", "def f():\n    from qtk.core import c"),
        "qtk.core.c": ("c.py", "from qtk.core.a import x"),
    }
    assert len(cycle(loop)) == 3
    assert any(line.startswith("b.py:2") for line in cycle(loop))


def test_a_planted_attribute_is_found() -> None:
    assert attribute_faults({"qtk.core.a": ("a.py", "import torch\nx = torch.ao.quantization")}) == [
        "a.py:2: uses torch.ao, which is banned"
    ]
