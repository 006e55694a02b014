"""Matches supergroups: chains of ops that a target fuses, with one quantizer after the last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from qtk.graph.flow import Flow
from qtk.planning.patterns import PatternMatch


@dataclass(frozen=True, slots=True)
class Supergroup:
    """One match: its ``nodes`` in graph order, and the chain of op names (``pattern``) they match."""

    nodes: tuple[fx.Node, ...]
    pattern: tuple[str, ...]

    def __str__(self) -> str:
        return " → ".join(self.pattern)


def match_supergroups(
    graph: fx.Graph, flow: Flow, patterns: Sequence[tuple[str, ...]], formulas: Mapping[fx.Node, PatternMatch]
) -> list[Supergroup]:
    """All matches, disjoint and in graph order; at each op the longest pattern that matches.

    A value between two ops of a match has no other reader, so its quantizer can be left out. Reshapes and other data
    movement do not break a chain. A formula written in small ops counts as one op, its last.

    Args:
        graph: the graph.
        flow: of the graph.
        patterns: chains of op names.
        formulas: each op of a formula → the formula.
    """
    longest_first = sorted(patterns, key=len, reverse=True)
    taken: set[fx.Node] = set()
    matches = []
    for node in graph.nodes:
        for pattern in longest_first:
            chain = _chain(node, flow, pattern, formulas)
            if chain and taken.isdisjoint(chain):
                taken.update(chain)
                matches.append(Supergroup(chain, pattern))
                break
    return matches


def _chain(
    node: fx.Node, flow: Flow, pattern: tuple[str, ...], formulas: Mapping[fx.Node, PatternMatch]
) -> tuple[fx.Node, ...]:
    chain = [node]
    for position, name in enumerate(pattern):
        if name not in _names(chain[-1], flow, formulas):
            return ()
        if position + 1 < len(pattern):
            following = _next(chain[-1], flow, formulas)
            if following is None:
                return ()
            chain.append(following)
    return tuple(chain)


def _names(node: fx.Node, flow: Flow, formulas: Mapping[fx.Node, PatternMatch]) -> tuple[str, ...]:
    """The names by which a pattern may match the op; an inner op of a formula has none."""
    if node in formulas:
        return (formulas[node].kind,) if node is formulas[node].nodes[-1] else ()
    row = flow.row(node)
    return row.names if row is not None else ()


def _next(node: fx.Node, flow: Flow, formulas: Mapping[fx.Node, PatternMatch]) -> fx.Node | None:
    """The only op that reads the value of ``node``, through data movement; ``None`` if there are several or none."""
    while True:
        formula = formulas.get(next(iter(node.users), node))
        if formula is not None and node not in formula.nodes and all(user in formula.nodes for user in node.users):
            return formula.nodes[-1]
        if len(node.users) != 1:
            return None
        (reader,) = node.users
        if not any(port.value is node for port in flow.data_ports(reader)):
            return None
        if flow.carried(reader) is not node:
            return reader
        row = flow.row(reader)
        if row is not None and row.mask:
            return reader
        node = reader
