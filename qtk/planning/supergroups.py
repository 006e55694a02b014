"""Matches supergroups: chains of ops that a target fuses, with one quantizer after the last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import fx

from qtk.graph.flow import Flow
from qtk.operators.op_row import Mask
from qtk.planning.patterns import PatternMatch

Pattern: TypeAlias = Sequence[str | tuple[str, ...]]
"""A chain of op names; where there are alternatives, any of them matches."""


@dataclass(frozen=True, slots=True)
class Supergroup:
    """One match: its ``nodes`` in graph order, and the ``names`` in the pattern that they match."""

    nodes: tuple[fx.Node, ...]
    names: tuple[str, ...]

    def __str__(self) -> str:
        return " → ".join(self.names)


def match_supergroups(
    graph: fx.Graph, flow: Flow, patterns: Sequence[Pattern], formulas: Mapping[fx.Node, PatternMatch]
) -> list[Supergroup]:
    """All matches, disjoint and in graph order; at each op the longest pattern that matches.

    A value between two ops of a match has no other reader, so its quantizer can be left out. Reshapes and other data
    movement do not break a chain. A formula written in small ops counts as one op, its last.

    Args:
        graph: the graph.
        flow: of the graph.
        patterns: chains of op names, or of alternatives.
        formulas: each op of a formula → the formula.
    """
    alternatives = [[(link,) if isinstance(link, str) else link for link in pattern] for pattern in patterns]
    longest_first = sorted(alternatives, key=len, reverse=True)
    taken: set[fx.Node] = set()
    matches = []
    for node in graph.nodes:
        for pattern in longest_first:
            match = _match(node, flow, pattern, formulas)
            if match is not None and taken.isdisjoint(match.nodes):
                taken.update(match.nodes)
                matches.append(match)
                break
    return matches


def _match(
    node: fx.Node, flow: Flow, pattern: Sequence[tuple[str, ...]], formulas: Mapping[fx.Node, PatternMatch]
) -> Supergroup | None:
    nodes: list[fx.Node] = []
    matched: list[str] = []
    following: fx.Node | None = node
    for alternatives in pattern:
        names = () if following is None else _names(following, flow, formulas)
        name = next((name for name in alternatives if name in names), None)
        if following is None or name is None:
            return None
        nodes.append(following)
        matched.append(name)
        if len(nodes) < len(pattern):
            following = _next(following, flow, formulas)
    return Supergroup(tuple(nodes), tuple(matched))


def _names(node: fx.Node, flow: Flow, formulas: Mapping[fx.Node, PatternMatch]) -> tuple[str, ...]:
    """The names by which a pattern may match the op; an inner op of a formula has none."""
    if node in formulas:
        return (formulas[node].kind,) if node is formulas[node].nodes[-1] else ()
    row = flow.row(node)
    return row.names if row is not None else ()


def _next(node: fx.Node, flow: Flow, formulas: Mapping[fx.Node, PatternMatch]) -> fx.Node | None:
    """The only op that reads the value of ``node``, through data movement; ``None`` if there are several or none."""
    while True:
        readers = flow.next_ops(node)
        formula = formulas.get(next(iter(readers), node))
        if formula is not None and node not in formula.nodes and all(reader in formula.nodes for reader in readers):
            return formula.nodes[-1]
        if len(readers) != 1:
            return None
        (reader,) = readers
        if not any(port.value is node for port in flow.data_ports(reader)):
            return None
        if flow.carried(reader) is not node:
            return reader
        row = flow.row(reader)
        if row is not None and Mask.MAKES in row.mask:
            return reader
        node = reader
