"""Chains of ops that a target runs as one: one quantizer, after the last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from qtk.graph.flow import Flow


@dataclass(frozen=True, slots=True)
class Supergroup:
    """A match: ``nodes`` in order, the ``pattern`` they matched."""

    nodes: tuple[fx.Node, ...]
    pattern: tuple[str, ...]

    def __str__(self) -> str:
        return " → ".join(self.pattern)


def match_supergroups(graph: fx.Graph, flow: Flow, patterns: Sequence[tuple[str, ...]]) -> list[Supergroup]:
    """Disjoint matches, the longest pattern first at each op, ops in graph order.

    Between two ops of a match the value has one reader, so nobody misses it when it is not quantized.
    """
    longest_first = sorted(patterns, key=len, reverse=True)
    taken: set[fx.Node] = set()
    matches = []
    for node in graph.nodes:
        for pattern in longest_first:
            chain = _chain(node, flow, pattern)
            if chain and taken.isdisjoint(chain):
                taken.update(chain)
                matches.append(Supergroup(chain, pattern))
                break
    return matches


def _chain(node: fx.Node, flow: Flow, pattern: tuple[str, ...]) -> tuple[fx.Node, ...]:
    chain = [node]
    for position, name in enumerate(pattern):
        row = flow.row(chain[-1])
        if row is None or name not in row.names:
            return ()
        if position + 1 < len(pattern):
            readers = list(chain[-1].users)
            if len(readers) != 1 or readers[0].op == "output":
                return ()
            if not any(port.value is chain[-1] for port in flow.data_ports(readers[0])):
                return ()
            chain.append(readers[0])
    return tuple(chain)
