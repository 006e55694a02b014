"""Heads of language models: the product whose results are one number for each word that the model looks up.

It is recognized by what it does in the graph: as many outputs as an embedding that inputs of the model select from has
rows, and no other product with weights behind it. Servers leave it in float, and often its weight is the embedding's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, fx

from qtk.capture.prepared_model import PreparedModel
from qtk.graph.flow import Flow
from qtk.graph.graphs import graphs
from qtk.graph.sites import value_site
from qtk.graph.written_buffers import is_input
from qtk.operators.lookup import is_elementwise, row_of
from qtk.operators.op_row import Role

EMBEDDING = "embedding"
ARANGE = torch.ops.aten.arange


def vocabularies(of: Iterable[fx.Graph]) -> frozenset[int]:
    """The numbers of rows of the embeddings that are looked up by inputs; positions, which are counted, are none."""
    found: set[int] = set()
    for graph in of:
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
    return frozenset(node for node in _last_products(graph, flow) if _length(node, -1) in vocabularies)


def _length(node: fx.Node, axis: int) -> int | None:
    """The length of an axis; ``None`` if it varies, or the value is a tuple, as of recurrent nets."""
    value = node.meta.get("val")
    length = value.shape[axis] if isinstance(value, Tensor) and value.ndim else None
    return length if isinstance(length, int) else None


def _multiplies(flow: Flow, node: fx.Node) -> bool:
    """Says whether an op is a product with weights."""
    row = flow.row(node)
    return row is not None and row.multiplies and row.kind != EMBEDDING and bool(flow.weight_ports(node))


def _is_given(ids: object) -> bool:
    """Says whether ids are an input of the graph: moved, merged with others, or changed element by element.

    Of an element-wise op all operands of its shape must be such, but for constants and masks: positions are a count,
    ``arange`` or ``cumsum``, even where an input is added to it or multiplied with it.
    """
    seen: dict[fx.Node, bool] = {}

    def given(node: object) -> bool:
        if not isinstance(node, fx.Node):
            return False
        if node not in seen:
            seen[node] = is_input(node) or (node.op == "call_function" and _follows(node))
        return seen[node]

    def _follows(node: fx.Node) -> bool:
        row = row_of(node)
        role = None if row is None else row.role
        if role is Role.MOVEMENT:
            return bool(node.args) and given(node.args[0])
        if role is Role.MERGE and not is_elementwise(node):
            return any(given(each) for each in node.all_input_nodes if _is_integer(each))
        if not is_elementwise(node) or not _is_integer(node):
            return False
        shape = node.meta["val"].shape
        operands = [each for each in node.all_input_nodes
                    if _is_integer(each) and each.meta["val"].shape == shape and not _is_constant(each)]
        return bool(operands) and all(map(given, operands))

    return given(ids)


def _is_integer(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype is not torch.bool and not (
        value.is_floating_point() or value.is_complex())


def _is_constant(node: fx.Node) -> bool:
    """Says whether a value is one number everywhere."""
    row = row_of(node) if node.op == "call_function" else None
    return row is not None and row.role is Role.CREATE and getattr(node.target, "overloadpacket", None) is not ARANGE


def warn_without_heads(
    model: PreparedModel, flows: Iterable[tuple[fx.Graph, Flow]], is_quantized: Callable[[fx.Node], bool]
) -> None:
    """Warns of quantized products that may be the head of a language model, and were not found to be.

    That is the last product of a graph, where inputs of the model select from an embedding in a way that is not
    followed, or of other length; or which has an output for each row of a parameter that no graph reads (or by another
    name), as where the model is called with ``inputs_embeds``. One as wide as the embedding makes hidden states.
    """
    unread, embeddings, last = _unread_rows(model), dict[int, int](), dict[fx.Node, int]()
    for graph, flow in flows:  # of all graphs, before any is judged
        for node in graph.nodes:
            row = flow.row(node)
            if row is not None and row.kind == EMBEDDING and _depends_on_inputs(node.args[1]):
                embeddings |= {rows: width for port in flow.weight_ports(node)
                               if (rows := _length(port.value, 0)) and (width := _length(port.value, -1))}
        last |= {node: length for node in _last_products(graph, flow)
                 if (length := _length(node, -1)) is not None and is_quantized(node)}
    likely = [node for node, length in last.items()
              if length in unread or (embeddings and length not in embeddings.values())]
    if likely:
        site = value_site(likely[0]).name.partition(":")[0]
        warnings.warn(
            f"a rule is of the head of a language model (lm_head), and none was found: {site} computes "
            f"{last[likely[0]]} outputs, and no embedding that the inputs select from has as many rows. If it is the "
            f"head, write the rule {{match: {{path: {site!r}}}, weight: float}}; if there is none, nothing is amiss",
            stacklevel=7)


def _last_products(graph: fx.Graph, flow: Flow) -> list[fx.Node]:
    """The products with weights that have no other behind them."""
    followed: dict[fx.Node, bool] = {}  # whether a product with weights is behind a value
    for node in reversed(graph.nodes):
        followed[node] = any(followed[user] or _multiplies(flow, user) for user in node.users)
    return [node for node in graph.nodes if _multiplies(flow, node) and not followed[node]]


def _unread_rows(model: PreparedModel) -> set[int]:
    """The numbers of rows of the matrices that no graph reads, by this name."""
    read = {str(node.target) for graph in graphs(model).values() for node in graph.graph.nodes if node.op == "get_attr"}
    return {len(tensor) for name, tensor in model.named_parameters(remove_duplicate=False)
            if tensor.ndim == 2 and name not in read}


def _depends_on_inputs(value: object) -> bool:
    """Says whether a value is computed from inputs."""
    ahead, seen = [value], set[object]()
    while ahead:
        node = ahead.pop()
        if isinstance(node, fx.Node) and node not in seen:
            if is_input(node):
                return True
            seen.add(node)
            ahead += node.all_input_nodes
    return False
