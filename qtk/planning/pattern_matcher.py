"""Finds the subgraphs that compute the same as a piece of torch code, in whatever ops they are written.

Graph and code are compared in normal form. The name of an argument of the code determines which values it matches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import fx

from qtk.graph.sites import is_float
from qtk.planning.normal_form import HALVES, INTERLEAVED, NormalForm, Value

ATEN = torch.ops.aten

PARAMETERS = ("weight", "bias")
"""Names of arguments that match values computed from parameters alone."""

NUMBERS = ("eps", "factor")
"""Names of arguments that match any number."""

TABLES = ("cos", "sin")
"""Names of arguments that match data and parameters; all other names match data."""

TOLERANCE = 1e-3
"""Largest relative difference of a number from the number in the pattern."""


Pair: TypeAlias = tuple[Value | None, Value | None, bool]
"""A value of the pattern, the value of the graph to match it with, and whether an elementwise op reads it."""

# Not in the op table: these say how the normal form writes the few ops it uses, not what the ops do.

COMMUTATIVE = (ATEN.add, ATEN.mul)
NUMERIC = (*COMMUTATIVE, ATEN.sub, ATEN.clamp, ATEN.softplus)
"""Ops whose numbers are part of what they compute; the numbers of other ops are axes and shapes."""

ELEMENTWISE = (*NUMERIC, ATEN.reciprocal, ATEN.sqrt, ATEN.rsqrt)
BROADCASTS = (ATEN.expand.default, ATEN.expand_as.default, ATEN.unsqueeze.default)
"""Ops that an elementwise reader would do by itself."""

OVER_AXES = (ATEN.sum, ATEN.mean, ATEN.amax, ATEN.var, ATEN.logsumexp, ATEN.cat, ATEN.stack, *HALVES, *INTERLEAVED)
"""Ops whose second argument is the axes they work on."""


@dataclass
class SpellingMatch:
    """A match, possibly incomplete: placeholder name → matched value, and the matched ops of the normal form."""

    arguments: dict[str, Value] = field(default_factory=dict)
    ops: list[fx.Node] = field(default_factory=list)


class PatternMatcher:
    """Matches one spelling against graphs.

    The operands of sums and products match in either order, with backtracking; numbers match within ``TOLERANCE``; a
    placeholder matches the values that its name allows; a value with two readers may be computed twice; all reductions
    of a match use the same axes. (Torch's ``SubgraphMatcher`` allows one order, exact literals and one reader.)

    Args:
        code: normal form of the spelling, without what nothing reads.
    """

    def __init__(self, code: fx.Graph) -> None:
        (self.result,) = code.output_node().all_input_nodes
        ops = [node for node in code.nodes if node.op == "call_function" and node.target not in BROADCASTS]
        self.size = len(ops)
        self.targets = {node.target for node in ops}

    def matches(self, form: NormalForm) -> Iterator[SpellingMatch]:
        """Every match in a graph; they may overlap."""
        if not self.targets <= form.by_target.keys():
            return
        for node in form.by_target[self.result.target]:
            match = SpellingMatch()
            if self._match_all(((self.result, node, False),), match, form):
                yield match

    def _match_all(self, todo: tuple[Pair, ...], match: SpellingMatch, form: NormalForm) -> bool:
        """Says whether all pairs match and complete a valid match. Extends ``match``; leaves it unchanged if not."""
        if not todo:
            return _has_one_set_of_axes(match) and inner_ops(match, form) is not None
        (pattern, value, elementwise), *others = todo
        rest = tuple(others)
        if not isinstance(pattern, fx.Node):
            return _is_number(pattern, value) and self._match_all(rest, match, form)
        if pattern.op == "placeholder":
            return value is not None and self._bind(str(pattern.target), value, rest, match, form)
        if not isinstance(value, fx.Node):
            return False
        ops = _through_broadcasts(value) if elementwise else [value]
        if ops[-1].target is not pattern.target:
            return False
        before = len(match.ops)
        match.ops += ops
        for operands in _orders(pattern, ops[-1]):
            if self._match_all((*operands, *rest), match, form):
                return True
        del match.ops[before:]
        return False

    def _bind(
        self, name: str, value: Value, rest: tuple[Pair, ...], match: SpellingMatch, form: NormalForm
    ) -> bool:
        bound = match.arguments
        if name in bound:
            same = bound[name] is value if isinstance(value, fx.Node) else bound[name] == value
            return same and self._match_all(rest, match, form)
        if not _takes(name, value, form) or (name not in NUMBERS and any(value is other for other in bound.values())):
            return False
        bound[name] = value
        if self._match_all(rest, match, form):
            return True
        del bound[name]
        return False


def inner_ops(match: SpellingMatch, form: NormalForm) -> list[fx.Node] | None:
    """All original ops of a match; ``None`` if an op outside reads an inner value."""
    last = form.made_by[match.ops[0]][-1]
    inside = {node for op in match.ops for node in form.made_by[op]}
    unseen = [node for node in inside if node is not last]
    while unseen:
        for user in unseen.pop().users:
            if user in inside:
                continue
            if user not in form.removed:
                return None
            inside.add(user)
            unseen.append(user)
    return list(inside)


def _takes(name: str, value: Value, form: NormalForm) -> bool:
    """Says whether a placeholder called ``name`` matches ``value``."""
    if name in NUMBERS or not isinstance(value, fx.Node):
        return name in NUMBERS and not isinstance(value, fx.Node)
    return is_float(value) and (name in TABLES or (value in form.static) == (name in PARAMETERS))


def _is_number(wanted: float | None, value: Value | None) -> bool:
    if wanted is None or value is None or isinstance(value, fx.Node):
        return wanted is value
    return abs(value - wanted) <= TOLERANCE * abs(wanted)


def _through_broadcasts(value: fx.Node) -> list[fx.Node]:
    chain = [value]
    while chain[-1].target in BROADCASTS:
        chain.append(chain[-1].all_input_nodes[0])
    return chain


def _orders(pattern: fx.Node, value: fx.Node) -> Iterator[list[Pair]]:
    """The possible pairings of the operands of two calls of one op; in each, placeholders come last."""
    wanted, present = _operands(pattern), _operands(value)
    if len(wanted) != len(present):
        return
    elementwise = pattern.target in ELEMENTWISE
    for operands in (present, present[::-1]) if pattern.target in COMMUTATIVE else (present,):
        pairs = [(p, operand, elementwise) for p, operand in zip(wanted, operands, strict=True)]
        yield sorted(pairs, key=lambda pair: isinstance(pair[0], fx.Node) and pair[0].op == "placeholder")


def _operands(node: fx.Node) -> list[Value | None]:
    """The operands of ``node``: its tensors, and its numbers if they are no axes or shapes."""
    if node.target in NUMERIC:
        return list(node.args)  # type: ignore[arg-type]
    first = node.args[0]
    return list(first) if isinstance(first, (list, tuple)) else [first]  # type: ignore[list-item, arg-type]


def _has_one_set_of_axes(match: SpellingMatch) -> bool:
    sets_of_axes = set()
    for op in match.ops:
        if op.target in OVER_AXES:
            axes: Any = op.args[1]
            sets_of_axes.add(axes if isinstance(axes, tuple) else (axes - (op.target is ATEN.stack),))
    return len(sets_of_axes) <= 1
