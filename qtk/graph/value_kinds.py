"""Which real-valued tensors hold counts, indices, offsets or masks: integers in all but their type."""

from __future__ import annotations

import enum
from collections.abc import Mapping

import torch
from torch import fx

from qtk.graph.flow import Flow, maker
from qtk.graph.sites import label, ports
from qtk.graph.written_buffers import is_input, is_state, written_buffers
from qtk.operators.op_row import OpRow, Role
from qtk.operators.op_table import IDENTITY, INDICES

CLOCK = "qtk_clock"
"""The label of what reads a buffer that another graph of the model counts in."""


class ValueKind(enum.Enum):
    """What the elements of a tensor are; of several operands the first in this order decides."""

    REAL = "data"
    INTEGER = "integers that are inputs of the model, or rounded data: ids and positions, but pixels and samples too"
    COUNT = "counts, indices, offsets or masks"


def value_kinds(graph: fx.Graph, flow: Flow) -> dict[fx.Node, ValueKind]:
    """The nature of the value of every node of a graph.

    After arithmetic and movement a tensor is what its operands are; parameters and constants among them do not matter.
    A buffer that forward writes and whose next value depends on itself alone counts calls.
    Other integers and booleans that the graph computes are COUNT, casts of data INTEGER.

    >>> import qtk
    >>> class Share(torch.nn.Module):
    ...     def forward(self, ids, x):
    ...         return (ids == 0).float().mean() + x, ids.float() * 0.1
    >>> graph = qtk.prepare_model(Share(), (torch.arange(4), torch.randn(4))).graph
    >>> [(node.name, nature.name) for node, nature in value_kinds(graph, Flow(graph)).items()
    ...  if node.op != 'output' and node.meta['val'].is_floating_point()]
    ... # doctest: +NORMALIZE_WHITESPACE
    [('x', 'REAL'), ('to', 'COUNT'), ('mean', 'COUNT'), ('add', 'REAL'), ('to_1', 'INTEGER'), ('mul', 'INTEGER')]
    """
    known: dict[fx.Node, ValueKind] = {}
    for node in graph.nodes:
        known[node] = _nature(node, flow, known)
    return known


def _nature(node: fx.Node, flow: Flow, known: Mapping[fx.Node, ValueKind]) -> ValueKind:
    value, row = node.meta.get("val"), flow.row(node)
    is_real = not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_complex()
    if is_clock(node):
        return ValueKind.COUNT
    if node.op in ("placeholder", "get_attr") or is_state(node):
        is_mask = isinstance(value, torch.Tensor) and value.dtype is torch.bool
        return ValueKind.REAL if is_real else ValueKind.COUNT if is_mask else ValueKind.INTEGER
    if row is not None and (row.role is Role.COUNT or row is INDICES):
        return ValueKind.COUNT
    if row is not None and (row.keeps_elements or row.counts):
        operands = {known[read] for read in _operands(maker(node), row) if not _is_neutral(read, flow)}
        nature = next((nature for nature in ValueKind if nature in operands), ValueKind.REAL)
        if is_real or nature is not ValueKind.REAL:
            return nature
        return ValueKind.INTEGER if row.kind == IDENTITY.kind else ValueKind.COUNT
    return ValueKind.REAL if is_real else ValueKind.COUNT


def is_clock(node: fx.Node) -> bool:
    """Says whether ``node`` reads a buffer whose next value depends on itself alone: the number of calls, a phase.

    A graph that passes it on unchanged does not tell; the label ``CLOCK`` says what the graph does that changes it.
    """
    if not is_state(node):
        return False
    seen: set[fx.Node] = set()
    pending = [write.value for write in written_buffers(node.graph).values() if write.read is node]
    if node in pending:
        return label(node, CLOCK) is not None
    while pending:
        current = pending.pop()
        if current is not node and is_input(current):
            return False
        if current not in seen and current is not node:
            seen.add(current)
            pending.extend(current.all_input_nodes)
    return True


def _operands(op: fx.Node, row: OpRow) -> list[fx.Node]:
    return [port.value for port in ports(op) if row.inputs is None or port.arg in row.inputs]


def _is_neutral(node: fx.Node, flow: Flow) -> bool:
    """Says whether the value is a parameter, or a number that does not depend on data."""
    row = flow.row(node)
    return flow.is_static(node) or (row is not None and row.role is Role.CREATE and row is not INDICES)
