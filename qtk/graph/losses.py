"""The loss that a graph computes from its outputs and their targets."""

from __future__ import annotations

from torch import Tensor, fx

from qtk.operators.op_table import row_of
from qtk.operators.targets import called_module


def loss_nodes(graph: fx.Graph) -> set[fx.Node]:
    """The ops that compute a loss, and its targets: inputs that nothing else reads.

    From an op of a loss, through ops without weights, only scalars that the graph returns are reached, and one of them
    depends on a target.
    """
    tail: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op in ("get_attr", "output") or not node.users:
            continue
        row = row_of(node)
        has_weights = row is not None and bool(row.weights or row.multiplies)
        if not has_weights and not _is_composite(node) and all(_ends(node, user, tail) for user in node.users):
            tail.add(node)
    loss = {node for node in tail if node.op == "placeholder"}
    for node in graph.nodes:
        if node in tail and not loss.isdisjoint(node.all_input_nodes):
            loss.add(node)
    for node in reversed(graph.nodes):
        if node in tail and not loss.isdisjoint(node.users):
            loss.add(node)
    return loss


def _ends(node: fx.Node, user: fx.Node, tail: set[fx.Node]) -> bool:
    """Whether what ``user`` does with the value of ``node`` ends in scalars."""
    value = node.meta.get("val")
    return user in tail or (user.op == "output" and isinstance(value, Tensor) and value.ndim == 0)


def _is_composite(node: fx.Node) -> bool:
    module = called_module(node)
    return module is not None and any(True for _ in module.children())
