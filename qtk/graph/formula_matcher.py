"""Torch's subgraph matcher, taught what two spellings of one formula may differ in.

* The operands of a sum or a product may come in either order.
* Casts, copies and ``detach`` on the way are looked through.
* Numbers that make the formula (factors, summands, exponents, indices) must agree, and a number may be a tensor of one
  element; axes, sizes and flags may be anything.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.passes.utils.matcher_utils import InternalMatch, SubgraphMatcher

from qtk.graph.op_table import row_of

COMMUTATIVE = (torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor)
COUNTED = ("add", "sub", "rsub", "mul", "div", "pow", "getitem", "clamp_min", "clamp", "hardtanh")
"""Kinds of op whose numbers are part of the formula."""

TOLERANCE = 1e-3
"""Relative; people write 0.7979 for √(2/π)."""


class PatternMatcher(SubgraphMatcher):
    """Finds a pattern in graphs as canonicalization leaves them."""

    def match(self, graph: fx.Graph, node_name_match: str = "") -> list[InternalMatch]:
        """Disjoint matches of a pattern with one result.

        Torch's own also looks for cycles that fusing a match would make; the casts looked through count as such there,
        and one result whose inner values nobody else reads cannot make any.
        """
        (anchor,) = self.pattern_anchors
        found = []
        for node in graph.nodes:
            match = InternalMatch(anchors=[anchor])
            if self._nodes_are_equal(anchor, node) and self._match_nodes(anchor, node, match):
                found.append(match)
        return self._remove_overlapping_matches([match for match in found if self._is_contained(match.nodes_map)])

    def _match_nodes(self, pn: fx.Node, gn: Any, match: InternalMatch, node_name_match: str = "") -> bool:
        gn = through(gn)
        if pn in match.nodes_map:
            return match.nodes_map[pn] is gn
        if not isinstance(gn, fx.Node):
            return self._match_number(pn, gn, match)
        if gn in match.nodes_map.values() or not self._nodes_are_equal(pn, gn, node_name_match):
            return False
        before = dict(match.nodes_map)
        match.nodes_map[pn] = gn
        if pn.op == "placeholder" or self._match_any_order(pn, gn, match):
            return True
        match.nodes_map = before
        return False

    def _match_any_order(self, pn: fx.Node, gn: fx.Node, match: InternalMatch) -> bool:
        ours, theirs = _arguments(pn), _arguments(gn)
        before = dict(match.nodes_map)
        if self._match_arguments(pn, ours, theirs, match):
            return True
        if pn.target not in COMMUTATIVE:
            return False
        match.nodes_map = before
        return self._match_arguments(pn, ours, [theirs[1], theirs[0], *theirs[2:]], match)

    def _match_arguments(self, pn: fx.Node, ours: list[Any], theirs: list[Any], match: InternalMatch) -> bool:
        counted = _kind(pn) in COUNTED
        for mine, other in zip(ours, theirs, strict=True):
            items, others = _items(mine), _items(other)
            if any(isinstance(item, fx.Node) for item in items):
                if len(items) != len(others):
                    return False
                pairs = zip(items, others, strict=True)
                if not all(self._match_nodes(a, b, match) for a, b in pairs if isinstance(a, fx.Node)):
                    return False
            elif counted and isinstance(mine, (int, float)) and not isinstance(mine, bool):
                number = constant_value(other)
                if number is None or not math.isclose(number, mine, rel_tol=TOLERANCE):
                    return False
        return True

    def _match_number(self, pn: fx.Node, number: Any, match: InternalMatch) -> bool:
        """A number where the pattern has an argument, such as eps."""
        if pn.op != "placeholder" or not isinstance(number, (int, float)):
            return False
        match.nodes_map[pn] = number  # type: ignore[assignment]
        return True

    def _is_contained(self, nodes_map: dict[fx.Node, fx.Node]) -> bool:
        """Whether nobody outside reads an inner value; constants that several formulas share may be read."""
        made = {gn for pn, gn in nodes_map.items() if pn.op != "placeholder"}
        inner = made - {nodes_map[pn] for pn in self.pattern_returning_nodes}
        return all(user in made for node in inner for user in readers(node))


def through(value: Any) -> Any:
    """The value that casts, copies and ``detach`` pass on."""
    while isinstance(value, fx.Node) and _passes_on(value):
        value = value.all_input_nodes[0]
    return value


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """Who reads a value, casts and copies looked through."""
    for user in node.users:
        if _passes_on(user):
            yield from readers(user)
        else:
            yield user


def constant_value(value: Any) -> float | None:
    """The number behind a literal or a tensor of one element that the model holds."""
    if isinstance(value, (int, float)):
        return float(value)
    value = through(value)
    if not isinstance(value, fx.Node) or value.op != "get_attr":
        return None
    owner, _, name = str(value.target).rpartition(".")
    module = value.graph.owning_module
    tensor = getattr(module.get_submodule(owner), name, None) if module is not None else None
    if not isinstance(tensor, torch.Tensor) or tensor.numel() != 1 or tensor.is_meta:
        return None
    return float(tensor)


def _passes_on(node: fx.Node) -> bool:
    row = row_of(node) if node.op in ("call_function", "call_module") else None
    return row is not None and row.kind in ("identity", "dropout")


def _items(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _kind(node: fx.Node) -> str:
    if node.target is operator.getitem:
        return "getitem"
    schema = getattr(node.target, "_schema", None)
    return schema.name.removeprefix("aten::") if schema is not None else ""


def _arguments(node: fx.Node) -> list[Any]:
    """All arguments, in the order of the schema, defaults filled in."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return list(node.args)
    schema = node.target._schema.arguments
    positional = dict(zip((argument.name for argument in schema), node.args, strict=False))
    given = {**positional, **node.kwargs}
    return [given.get(argument.name, argument.default_value) for argument in schema]
