"""Decisions that data make by order, such as a router's top-k, taken over from one path of a walk by another."""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor, fx

from qtk.operators.targets import aten_name, schema_arguments

WITH_VALUES = frozenset(("topk", "sort", "max", "min", "mode", "kthvalue", "median"))
"""Ops that return values and the indices that these were found at."""

INDICES = frozenset(("argsort", "argmax", "argmin"))
"""Ops that return indices alone."""


def decides(node: fx.Node) -> bool:
    """Says whether an op decides by the order of its values along one axis, and its indices are read.

    Of a maximum that is read as a value alone each path has its own.
    """
    name = aten_name(node.target)
    if name in WITH_VALUES and isinstance(node.meta.get("val"), (list, tuple)):
        return any(user.target is operator.getitem and user.args[1] == 1 and user.users for user in node.users)
    return name in INDICES


def axis_of(node: fx.Node) -> int:
    """The axis along which an op decides."""
    given = schema_arguments(node).get("dim", -1)
    return given if isinstance(given, int) else -1


def sorts_ids(node: fx.Node) -> bool:
    """Says whether an op sorts integers: rows by the ids of their experts."""
    value = node.all_input_nodes[0].meta.get("val") if node.all_input_nodes else None
    return aten_name(node.target) in ("sort", "argsort") and isinstance(value, Tensor) and not value.is_floating_point()


def sorted_stably(node: fx.Node, x: Tensor) -> Any:
    """The result of the sort ``node`` for ``x``, made stable: the rows of one expert keep the order of the samples.

    >>> import torch
    >>> graph = fx.symbolic_trace(lambda x: x).graph
    >>> with graph.inserting_before(graph.output_node()):
    ...     node = graph.call_function(torch.ops.aten.argsort.default, (next(iter(graph.nodes)),))
    >>> sorted_stably(node, torch.tensor([1, 0, 1, 0])).tolist()
    [1, 3, 0, 2]
    """
    found = x.sort(dim=axis_of(node), descending=bool(schema_arguments(node).get("descending")), stable=True)
    return found.indices if aten_name(node.target) in INDICES else (found.values, found.indices)


def decided_as(result: Any, node: fx.Node, x: Tensor) -> Any:
    """Returns the op's result for ``x`` with the decisions of ``result``: its indices, the values of ``x`` there.

    >>> import torch
    >>> graph = fx.symbolic_trace(lambda x: x).graph
    >>> with graph.inserting_before(graph.output_node()):
    ...     node = graph.call_function(torch.ops.aten.topk.default, (next(iter(graph.nodes)), 1))
    >>> values, indices = decided_as(torch.tensor([0.6, 0.4]).topk(1), node, torch.tensor([0.4, 0.5]))
    >>> values.item(), indices.item()
    (0.4000000059604645, 0)
    """
    if aten_name(node.target) in INDICES:
        return result
    _, indices = result
    axis = axis_of(node)
    is_kept = indices.ndim == x.ndim
    found = x.gather(axis, indices if is_kept else indices.unsqueeze(axis))
    return found if is_kept else found.squeeze(axis), indices
