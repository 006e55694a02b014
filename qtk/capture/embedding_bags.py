"""Writes bags of equal length as an embedding and its sum, mean or maximum, which runtimes have kernels for.

``torch.nn.functional.embedding_bag`` of indices [bags, length] gives its operator all indices in one row and where each
bag begins; in ONNX that is a loop over bags.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from qtk.torch_private import OpOverload

ATEN = torch.ops.aten
SUM, MEAN, MAXIMUM = range(3)
"""The modes of the operator."""


def open_bags(graph: fx.Graph) -> None:
    """Replaces each ``embedding_bag`` of indices [bags, length] of which all count. Changes ``graph``."""
    for node in graph.find_nodes(op="call_function", target=ATEN.embedding_bag.padding_idx):
        if (indices := _indices(node)) is not None:
            _open(graph, node, indices)


def _indices(node: fx.Node) -> fx.Node | None:
    """The indices [bags, length]; ``None`` if the bags are others, or anything but their values is read."""
    flat, starts, last_offset, padding = (node.args[index] for index in (1, 2, 7, 8))
    is_masked_maximum = padding is not None and node.args[4] == MAXIMUM
    if last_offset or is_masked_maximum or any(user.args[1] != 0 and user.users for user in node.users):
        return None
    if not (isinstance(flat, fx.Node) and flat.target is ATEN.reshape.default and flat.args[1] == [-1]
            and isinstance(starts, fx.Node) and starts.target is ATEN.arange.start_step and starts.args[0] == 0):
        return None
    indices, length = flat.args[0], starts.args[2]
    is_even = isinstance(indices, fx.Node) and isinstance(length, int) and indices.meta["val"].shape[1:] == (length,)
    return indices if isinstance(indices, fx.Node) and is_even and length else None


def _open(graph: fx.Graph, node: fx.Node, indices: fx.Node) -> None:
    weight, by_frequency, mode, is_sparse, factors, padding = (node.args[index] for index in (0, 3, 4, 5, 6, 8))

    def add(target: OpOverload, *args: Any) -> fx.Node:
        added = graph.call_function(target, args)
        added.meta = {**node.meta, "val": target(*fx.node.map_arg(args, lambda read: read.meta["val"]))}
        return added

    with graph.inserting_before(node):
        result = add(ATEN.embedding.default, weight, indices, -1, by_frequency, is_sparse)
        if factors is not None:  # of a sum alone
            of_bags = add(ATEN.reshape.default, factors, [-1, indices.meta["val"].shape[1], 1])
            result = add(ATEN.mul.Tensor, result, of_bags)
        if padding is not None:
            is_padding = add(ATEN.unsqueeze.default, add(ATEN.eq.Scalar, indices, padding), -1)
            result = add(ATEN.masked_fill.Scalar, result, is_padding, 0)
        if mode == MAXIMUM:
            result = add(ATEN.amax.default, result, [1])
        elif mode == SUM or padding is not None:
            result = add(ATEN.sum.dim_IntList, result, [1])
        else:
            result = add(ATEN.mean.dim, result, [1])
        if mode == MEAN and padding is not None:
            count = add(ATEN.sum.dim_IntList, add(ATEN.logical_not.default, is_padding), [1])
            result = add(ATEN.div.Tensor, result, add(ATEN.clamp.default, count, 1))
    for user in [*node.users]:
        user.replace_all_uses_with(result)
        graph.erase_node(user)
    graph.erase_node(node)
