"""The ops of a site in an exported program, repeated where lowerings look for them.

torchao and ExecuTorch find the ops of a value right before what computes with it and right behind what moves it, and
each reader of codes has a dequantize op of its own, as their own quantizers place them.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from qtk.operators.lookup import row_of
from qtk.operators.op_row import Role

_QUANTIZE, _DEQUANTIZE = "quantized_decomposed.quantize", "quantized_decomposed.dequantize_per_tensor"


def is_dequantize(node: fx.Node) -> bool:
    """Says whether a node is an op of ``quantized_decomposed`` that dequantizes."""
    return str(node.target).startswith("quantized_decomposed.dequantize")


def repeat_behind_movement(graph: fx.Graph) -> None:
    """Quantizes and dequantizes values per tensor again where moved elements of theirs are computed with.

    Changes ``graph``; the codes stay the same.
    """
    for node in list(graph.nodes):
        if str(node.target).startswith(_DEQUANTIZE):
            (codes, *_) = node.args
            if str(codes.target).startswith(_QUANTIZE):
                _repeat(codes, node, node)


def dequantize_for_each_reader(graph: fx.Graph) -> None:
    """Gives each reader of dequantized codes its own dequantize op.

    Changes ``graph``. XNNPACK's partitioner joins layers that share one, also around ops that it leaves alone: a cycle.
    """
    for node in list(graph.nodes):
        if is_dequantize(node):
            for reader in sorted(node.users, key=lambda user: user.op != "output")[1:]:  # outputs keep their names
                with graph.inserting_after(node):
                    reader.replace_input_with(node, graph.node_copy(node))


def _repeat(quantize: fx.Node, dequantize: fx.Node, value: fx.Node) -> None:
    for moved in [user for user in value.users if _moves(user)]:
        _repeat(quantize, dequantize, moved)
        readers = [user for user in moved.users if user.op != "output" and not _moves(user)
                   and (user.target, user.args[1:]) != (quantize.target, quantize.args[1:])]
        if readers and isinstance(moved.meta["val"], Tensor) and moved.meta["val"].dtype is torch.float32:
            real = _again(dequantize, _again(quantize, moved))
            for reader in readers:
                reader.replace_input_with(moved, real)


def _again(op: fx.Node, value: fx.Node) -> fx.Node:
    """A copy of ``op`` right behind ``value``, which it reads."""
    assert callable(op.target)
    with value.graph.inserting_after(value):
        node = value.graph.node_copy(op)
    node.args = (value, *op.args[1:])
    node.meta["val"] = op.target(value.meta["val"], *op.args[1:], **op.kwargs)
    return node


def _moves(node: fx.Node) -> bool:
    """Says whether a node's result is elements, in any order, of the one tensor it reads, or a tuple of such."""
    row, result = row_of(node), node.meta.get("val")
    if row is None or row.role is not Role.MOVEMENT or row.mask:
        return False
    read = [value for value in node.all_input_nodes if not isinstance(value.meta.get("val"), torch.SymInt)]
    return len(read) == 1 and (not isinstance(result, Tensor) or result.is_floating_point())
