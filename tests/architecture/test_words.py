"""The field's words: what a reader from AIMET, torchao, ModelOpt or a paper searches for is what stands here.

Each row is a word that was replaced, where it must not come back, and what is written in its place.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "docs/*.md", "qtk/*/DECISIONS.md")


@dataclass(frozen=True)
class Rule:
    """A regular expression that must match nowhere in qtk/ and the documents, and what is written instead.

    ``apart_from``: files where the word is another project's own name, and folders, with their slash.
    """

    pattern: str
    instead: str
    apart_from: tuple[str, ...] = ()


RULES = (
    Rule(r"\bq?scheme_name\b|\bqscheme\b", "scheme"),
    Rule(r"\bqparams\b", "scale and zero_point"),
    Rule(r"\b(bitwidth|bit_width|bw)\b", "bits", (
        "qtk/aimet/schema_0_6_1.py", "qtk/aimet/schema_1_0_0.py", "qtk/config/aimet.py")),
    Rule(r"\bgroup_size\b", "block_size", ("qtk/export/compressed_tensors/arguments.py",)),
    Rule(r"\bacting (scale|zero point)|acting_(scale|zero_point)", "effective scale, effective_zero_point"),
    Rule(r"\bmade_up_for\b|\b(make|makes|made|making) up for\b",
         "block-coordinate descent, refine_jointly; error propagated to the remaining columns"),
    Rule(r"\bmask marks?\b", "attention-mask sentinel"),
    Rule(r"ranges? (that (is|are) )?(taken|found) at run time|takes? (its|their) ranges? at run time|takes_own_range",
         "dynamic quantization, dynamic range"),
    Rule(r"how a slope|\bslopes?\b", "gradient, straight-through estimator"),
    Rule(r"least noise|counted dearer", "minimises MSE over scale and zero point"),
    Rule(r"\bLayerProblem\b|\bImprovement\b|\bReached\b", "LayerState, LayerUpdate, LayerInput"),
    Rule(r"\brows_of\b|\bmatrix_of\b|\bnumerics[./]patches\b", "im2col, GEMM layout"),
    Rule(r"observers\.whole|observers\.points|\bWhole\(|\bPoints\(", "RawValues, WeightedSamples"),
    Rule(r"\bwhy_not_", "load_native() -> str | None, triton_unavailable() -> str | None"),
    Rule(r"[Ll]adder climb|climbs? (down )?the ladder", "fallback, island search"),
    Rule(r"one file less", "skipped {file}: {error}"),
    Rule(r"\b(those|that)\s+of\b", "the noun again: the scale of the input"),
    Rule(r"\balike\b", "the same; in the same way; both"),
    Rule(r"\bbesides\b", "also, in addition, only X has"),
    Rule(r"\b(hands|handed|handing|(?<!other )(?<!by )hand)\s+(\w+\s+){0,3}on\b", "passes, returns"),
    Rule(r"\b[Tt]hose\b(?! (members|entries)\b)", "the noun again: the layers that",
         ("qtk/kernels/", "qtk/ops/", "qtk/numerics/")),
    Rule(r"\bthe ones?\b(?! (kind|tensor|model|layer|scheme)\b)", "the noun again",
         ("qtk/kernels/", "qtk/ops/", "qtk/numerics/")),
    Rule(r"\bthe (latter|former)\b", "the noun again", ("qtk/kernels/", "qtk/ops/", "qtk/numerics/")),
)


@cache
def documents() -> dict[str, str]:
    """Path → text."""
    found = (*(ROOT / "qtk").rglob("*.py"), *(path for pattern in DOCUMENTS for path in ROOT.glob(pattern)))
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in sorted(found)}


@pytest.mark.medium
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.instead[:30])
def test_the_word_stays_out(rule: Rule) -> None:
    faults = []
    for shown, text in documents().items():
        if shown.startswith(rule.apart_from):
            continue
        for match in re.finditer(rule.pattern, text):
            line = text.count("\n", 0, match.start()) + 1
            faults.append(f"{shown}:{line}: {match.group()!r}; write: {rule.instead}")
    assert faults == []


def test_a_planted_word_is_found() -> None:
    assert re.search(RULES[3].pattern, "the group_size of a weight")
    assert not re.search(RULES[3].pattern, "regroup_sizes")


RIDDLES = ("Whether", "How", "Why", "What", "Which")


def riddles(text: str) -> Iterator[str]:
    """Yields the functions of a module whose docstrings begin with a clause in place of a verb."""
    for node in ast.walk(ast.parse(text)):
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_function and (ast.get_docstring(node) or "").startswith(RIDDLES):
            yield f"{node.lineno}: {node.name}"


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    faults = [f"{shown}:{fault}" for shown, text in documents().items() if shown.endswith(".py")
              and not shown.startswith(("qtk/kernels/", "qtk/ops/", "qtk/numerics/")) for fault in riddles(text)]
    assert faults == []
    assert list(riddles('def f():\n    """Whether it is so."""\n')) == ["1: f"]
