"""Evaluates sizes, and conditions on sizes, which torch writes as Python expressions over the names of free sizes."""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Mapping
from types import CodeType, SimpleNamespace

FUNCTIONS: Mapping[str, object] = {
    "max": max, "min": min, "abs": abs, "round": round, "math": math,
    "torch": SimpleNamespace(sym_float=float, _sym_sqrt=math.sqrt),
}
"""The functions that torch's printers write, and the namespaces of them."""

MEMBERS = {f"{space}.{name}" for space in ("math", "torch") for name in vars(FUNCTIONS[space])
           if not name.startswith("__")}

KNOWN_SYNTAX = (ast.Expression, ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Compare, ast.IfExp, ast.Call, ast.Constant,
                ast.Name, ast.Attribute, ast.boolop, ast.operator, ast.unaryop, ast.cmpop, ast.expr_context)


def evaluate(condition: str, lengths: Mapping[str, int]) -> bool:
    """The value of a condition over names of lengths; false where it divides by 0, or has no value else.

    >>> evaluate("math.trunc(torch.sym_float(s0) ** 0.5) == 4", {"s0": 17})
    True

    Raises: NameError, SyntaxError if it has another name, a function that is not known, or is no arithmetic.
    """
    try:
        return bool(_value(condition, lengths))
    except (ArithmeticError, ValueError):
        return False


def size_at(size: str, lengths: Mapping[str, int]) -> int | None:
    """The value of a size over names of lengths; ``None`` if it has another name, or is none.

    >>> size_at("2*s0 + 1", {"s0": 3}), size_at("s1", {"s0": 3})
    (7, None)
    """
    if size in lengths:
        return lengths[size]
    try:
        return int(_value(size, lengths))
    except (NameError, SyntaxError, ArithmeticError, ValueError):
        return None


def is_readable(condition: str, lengths: Mapping[str, int]) -> bool:
    """Says whether a condition over names of lengths can be evaluated."""
    try:
        evaluate(condition, lengths)
    except (NameError, SyntaxError):
        return False
    return True


def _value(expression: str, lengths: Mapping[str, int]) -> float:
    value: float = eval(_compiled(expression), {"__builtins__": {}, **FUNCTIONS}, dict(lengths))
    return value


@functools.cache
def _compiled(expression: str) -> CodeType:
    tree = ast.parse(expression, "<sizes>", "eval")
    for node in ast.walk(tree):
        if not isinstance(node, KNOWN_SYNTAX):
            raise SyntaxError(f"{type(node).__name__} is no arithmetic")
        if isinstance(node, ast.Attribute) and ast.unparse(node) not in MEMBERS:
            raise NameError(f"{ast.unparse(node)} is not known")
    return compile(tree, "<sizes>", "eval")
