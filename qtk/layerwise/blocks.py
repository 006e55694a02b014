"""The blocks of a graph: stretches of it that one value enters and one value leaves, as between residual joins."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from torch import Tensor, fx

LONG = 8
"""Weighted ops that a value outlives from which it is a skip around whole stages, or an encoder's output."""


def block_starts(nodes: Sequence[fx.Node], weighted: Collection[fx.Node], last_reads: Mapping[fx.Node, int],
                 is_parameter: Callable[[fx.Node], bool]) -> list[int]:
    """The index of the first node of every block; each has a weighted op, and a block ends as late as it can.

    A cut lies where of the values that depend on weighted ops at most one is still to be read, those apart that
    outlive ``LONG`` weighted ops: rotary tables and masks depend on none, an encoder's output lives on.

    Args:
        nodes: of the graph, in order.
        weighted: those that multiply with a weight to be reconstructed, or hold such.
        last_reads: value → index of the last node that reads it.
        is_parameter: whether a node is a parameter.
    """
    passed, count, begins = [0], 0, dict[fx.Node, int]()
    dependent = set[fx.Node]()
    for index, node in enumerate(nodes):
        if node in weighted or not dependent.isdisjoint(node.all_input_nodes):
            dependent.add(node)
            if last_reads[node] > index and isinstance(node.meta.get("val", Tensor()), (Tensor, tuple, list)):
                begins[node] = index
        count += node in weighted
        passed.append(count)
    crossing = [0] * (len(nodes) + 1)  # changes of the number of values that a cut before the node goes through
    for node, begin in begins.items():
        if passed[last_reads[node]] - passed[begin + 1] < LONG:
            crossing[begin + 1] += 1
            crossing[last_reads[node] + 1] -= 1
    starts, alive, cut = [0], 0, None
    for index, node in enumerate(nodes):
        alive += crossing[index]
        if alive <= 1 and not is_parameter(node) and passed[index] > passed[starts[-1]]:
            cut = index
        if node in weighted and cut is not None:
            starts.append(cut)
            cut = None
    return starts


def windows(starts: Sequence[int], length: int, end: int) -> list[list[int]]:
    """Stretches of ``length`` blocks: the index of the first node of each, then the ends of its blocks.

    >>> windows([0, 5, 9], 2, 12)
    [[0, 5, 9], [9, 12]]
    """
    cuts = [*starts, end]
    return [cuts[first:first + length + 1] for first in range(0, len(starts), length)]
