"""Heads of language models: the product whose results are one number for each word that the model looks up.

It is recognized by what it does in the graph: as many outputs as an embedding that inputs of the model select from has
rows, and no other product with weights behind it. Servers leave it in float, and often its weight is the embedding's.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, fx

from qtk.graph.flow import Flow
from qtk.graph.written_buffers import is_input
from qtk.operators.op_row import Role
from qtk.operators.op_table import row_of

EMBEDDING = "embedding"


def vocabularies(graphs: Iterable[fx.Graph]) -> frozenset[int]:
    """The numbers of rows of the embeddings that are looked up by inputs; positions, which are counted, are none."""
    found: set[int] = set()
    for graph in graphs:
        flow = Flow(graph)
        for node in graph.nodes:
            row = flow.row(node)
            if row is not None and row.kind == EMBEDDING and _is_given(node.args[1]):
                found |= {length for port in flow.weight_ports(node) if (length := _length(port.value, 0)) is not None}
    return frozenset(found)


def language_heads(graph: fx.Graph, flow: Flow, vocabularies: frozenset[int]) -> frozenset[fx.Node]:
    """The heads of a graph.

    Args:
        graph: the graph.
        flow: of the graph.
        vocabularies: the numbers of rows of the model's embeddings.
    """
    followed: dict[fx.Node, bool] = {}  # whether a product with weights is behind a value
    for node in reversed(graph.nodes):
        followed[node] = any(followed[user] or _multiplies(flow, user) for user in node.users)
    return frozenset(
        node for node in graph.nodes
        if _multiplies(flow, node) and not followed[node] and _length(node, -1) in vocabularies
    )


def _length(node: fx.Node, axis: int) -> int | None:
    """The length of an axis; ``None`` if it varies, or the value is a tuple, as of recurrent nets."""
    value = node.meta.get("val")
    length = value.shape[axis] if isinstance(value, Tensor) and value.ndim else None
    return length if isinstance(length, int) else None


def _multiplies(flow: Flow, node: fx.Node) -> bool:
    """Whether an op is a product with weights."""
    row = flow.row(node)
    return row is not None and row.multiplies and row.kind != EMBEDDING and bool(flow.weight_ports(node))


def _is_given(ids: object) -> bool:
    """Whether ids are an input of the graph, moved at most."""
    while isinstance(ids, fx.Node) and not is_input(ids):
        row = row_of(ids)
        ids = ids.args[0] if row is not None and row.role is Role.MOVEMENT and ids.args else None
    return isinstance(ids, fx.Node)
