"""Which values are read by their absolute size alone: arguments of sines, of floors, of casts to integers."""

from __future__ import annotations

import torch
from torch import fx

from qtk.graph.flow import Flow, maker
from qtk.graph.sites import is_float
from qtk.operators.op_row import Precision
from qtk.operators.op_table import IDENTITY


def absolute_values(graph: fx.Graph, flow: Flow) -> set[fx.Node]:
    """The float values that only such ops read, directly or behind sums and products that nothing else reads.

    >>> import qtk
    >>> class Embedding(torch.nn.Module):
    ...     def forward(self, t, x):
    ...         angle = t[:, None] * torch.linspace(1, 9, 4)
    ...         return torch.cat([angle.cos(), angle.sin()], 1) + x
    >>> graph = qtk.prepare_model(Embedding(), (torch.rand(2), torch.rand(2, 8))).graph
    >>> sorted(node.name for node in absolute_values(graph, Flow(graph)) if not Flow(graph).is_static(node))
    ['mul', 't']
    """
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if is_float(node) and flow.carried(node) is None and _is_absolute(node, flow, found):
            found.add(node)
    return found


def _is_absolute(node: fx.Node, flow: Flow, found: set[fx.Node]) -> bool:
    readers = [port.user for port in flow.readers(node)]
    return bool(readers) and all(
        _is_cast_to_integers(user, flow) or _reads_absolutely(user, flow, found) for user in readers
    )


def _is_cast_to_integers(user: fx.Node, flow: Flow) -> bool:
    row, value = flow.row(user), user.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_complex():
        return False
    return value.dtype is not torch.bool and row is not None and row.kind == IDENTITY.kind


def _reads_absolutely(user: fx.Node, flow: Flow, found: set[fx.Node]) -> bool:
    row = flow.row(user)
    if row is None or maker(user) is not user:
        return False
    return row.precision is Precision.FRACTION or (row.precision is Precision.ABSOLUTE and user in found)
