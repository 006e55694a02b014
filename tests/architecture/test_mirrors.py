"""``qtk/a/b.py`` is tested by ``tests/a/test_b.py``; where it is tested elsewhere, the table says where."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

ELSEWHERE = {
    # an op, its reference and its kernels are compared in one place
    "kernels/gpu/*.py": ("tests/ops/test_{stem}.py", "qtk.kernels.gpu.{stem}"),
    "numerics/*.py": ("tests/ops/test_{stem}.py", "qtk.numerics.{stem}"),
    "numerics/dynamic.py": ("tests/ops/test_fake_quantize_dynamic.py", "qtk.numerics.dynamic"),
    "kernels/gpu/codes.py": ("tests/kernels/gpu/test_fake_quantize.py", "qtk.kernels.gpu.fake_quantize"),
    "kernels/gpu/table.py": ("tests/ops/test_fake_quantize_many.py", "qtk.kernels.gpu.table"),
    "kernels/backends.py": ("tests/kernels/test_native.py", "qtk.kernels.backends"),
    # parts that only their whole runs
    "planning/plan_*.py": ("tests/planning/test_planner.py", "qtk.planning.planner"),
    "planning/draft.py": ("tests/planning/test_planner.py", "qtk.planning.planner"),
    "planning/share_merges.py": ("tests/planning/test_planner.py", "qtk.planning.planner"),
    "transforms/fold_batch_norm_step.py": ("tests/transforms/test_fold_batch_norms.py", "qtk.fold_batch_norms"),
    "transforms/keep_batch_norm_step.py": ("tests/transforms/test_keep_batch_norms.py",
                                           "qtk.transforms.keep_batch_norms"),
    "transforms/foldable_batch_norms.py": ("tests/transforms/test_fold_batch_norms.py", "qtk.fold_batch_norms"),
    "transforms/graph_editor.py": ("tests/transforms/test_fold_batch_norms.py", "qtk.fold_batch_norms"),
    "layerwise/bias_correction.py": ("tests/layerwise/test_methods.py", "qtk.layerwise.bias_correction"),
    "layerwise/layer_update.py": ("tests/workflow/test_layerwise.py", "qtk.apply_layerwise"),
    "layerwise/nested_layers.py": ("tests/layerwise/test_walk.py", "qtk.layerwise.walk"),
    "layerwise/input_taps.py": ("tests/layerwise/test_walk.py", "qtk.layerwise.walk"),
    "layerwise/run.py": ("tests/workflow/test_layerwise.py", "qtk.apply_layerwise"),
    "transforms/label_*.py": ("tests/transforms/test_channel_scales.py", "qtk.transforms.channel_scales"),
    "transforms/clamp_*.py": ("tests/transforms/test_equalize.py", "qtk.transforms.equalize"),
    "transforms/weight_rules.py": ("tests/transforms/test_channel_scales.py", "qtk.transforms.channel_scales"),
    "transforms/channel_findings.py": ("tests/transforms/test_channel_scales.py", "qtk.transforms.channel_scales"),
    "transforms/absorbers.py": ("tests/transforms/test_channel_scales.py", "qtk.transforms.channel_scales"),
    "auto/bit_search.py": ("tests/auto/test_assign_bits.py", "qtk.assign_bits"),
    "auto/choices.py": ("tests/auto/test_quantize.py", "qtk.quantize"),
    "workflow/float_outputs.py": ("tests/auto/test_quantize.py", "qtk.quantize"),
    "auto/ladder.py": ("tests/auto/test_quantize.py", "qtk.quantize"),
    "auto/trial*.py": ("tests/auto/test_quantize.py", "qtk.quantize"),
    "report/page.py": ("tests/workflow/test_report.py", "sim.report"),
    "report/svg.py": ("tests/workflow/test_report.py", "sim.report"),
    "report/account.py": ("tests/auto/test_quantize.py", "qtk.quantize"),
    "workflow/layerwise_methods.py": ("tests/workflow/test_layerwise.py", "qtk.apply_gptq"),
    "layerwise/ranks.py": ("tests/observers/test_ranks.py", "qtk.apply_layerwise"),
}
"""File of qtk, or glob → the test file that covers it, and what that names to run it."""


def uncovered(files: Iterable[str], tests: dict[str, str], elsewhere: dict[str, tuple[str, str]]) -> list[str]:
    """The files of qtk that no test file covers. ``tests``: path → source."""
    return [file for file in files if not _is_covered(Path(file), tests, elsewhere)]


def _is_covered(file: Path, tests: dict[str, str], elsewhere: dict[str, tuple[str, str]]) -> bool:
    if str(Path("tests") / file.parent / f"test_{file.name}") in tests:
        return True
    lines = [line for glob, line in elsewhere.items() if fnmatchcase(str(file), glob)]
    return any(_names(tests.get(path.format(stem=file.stem)), name.format(stem=file.stem)) for path, name in lines)


def _names(source: str | None, name: str) -> bool:
    """Whether a test imports a module, or writes an attribute of a package it imports."""
    if source is None:
        return False
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ImportFrom(module, names):
                found = [module, *(f"{module}.{alias.name}" for alias in names)]
            case ast.Import(names):
                found = [alias.name for alias in names]
            case ast.Attribute():
                found = [ast.unparse(node)]
            case ast.Constant(str(text)):
                found = [text]  # of importorskip
            case _:
                continue
        if name in found:
            return True
    return False


def test_every_file_has_its_test() -> None:
    files = [str(path.relative_to(ROOT / "qtk")) for path in sorted((ROOT / "qtk").rglob("*.py"))]
    tests = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")}
    assert uncovered([file for file in files if not file.endswith("__init__.py")], tests, ELSEWHERE) == []


@pytest.mark.parametrize(("tests", "found"), [
    ({}, ["a/b.py"]),
    ({"tests/a/test_b.py": ""}, []),
    ({"tests/test_b.py": ""}, ["a/b.py"]),
    ({"tests/other.py": "import qtk.a.c"}, ["a/b.py"]),
    ({"tests/other.py": "# qtk.a.b"}, ["a/b.py"]),
    ({"tests/other.py": "from qtk.a import b"}, []),
    ({"tests/other.py": "from qtk.a.b import c"}, []),
    ({"tests/other.py": "pytest.importorskip('qtk.a.b')"}, []),
])
def test_a_planted_gap_is_found(tests: dict[str, str], found: list[str]) -> None:
    assert uncovered(["a/b.py"], tests, {"a/*.py": ("tests/other.py", "qtk.a.{stem}")}) == found
