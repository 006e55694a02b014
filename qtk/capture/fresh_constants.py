"""Constants that the code of a model makes anew in each call, ``torch.tensor([])``, as an exported program has them."""

from __future__ import annotations

import torch
from torch import Tensor, fx

ATEN = torch.ops.aten
LIFT, CLONE, CAT = ATEN.lift_fresh_copy.default, ATEN.clone.default, ATEN.cat.default
DETACH, DETACH_ = ATEN.detach.default, ATEN.detach_.default


def settle_fresh_constants(graph: fx.Graph) -> None:
    """Makes each fresh constant a clone, not detached, ``detach_`` of any other value a ``detach``. Changes ``graph``.

    Torch detaches a fresh constant in place, which leaves its values as they are, and alone would have the program
    functionalized: that takes as long as the export, and loses ``detach_`` of values that gradients pass.
    """
    for node in [node for target in (DETACH, DETACH_) for node in graph.find_nodes(op="call_function", target=target)]:
        source = node.args[0]
        if not isinstance(source, fx.Node):
            continue
        if _is_fresh(source):
            node.replace_all_uses_with(source)
            graph.erase_node(node)
        elif node.target is DETACH_:
            node.target = DETACH
            for user in [user for user in source.users if user > node]:
                user.replace_input_with(source, node)
    for node in graph.find_nodes(op="call_function", target=LIFT):
        node.target = CLONE


def _is_fresh(node: fx.Node) -> bool:
    """Says whether a value is a fresh constant, or a clone of one."""
    while node.target is CLONE and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node.target is LIFT


def drop_empty_operands(graph: fx.Graph) -> None:
    """Drops the operands of shape [0] of concatenations, which torch skips: an empty cache. Changes ``graph``."""
    for node in graph.find_nodes(op="call_function", target=CAT):
        operands = node.args[0]
        if not isinstance(operands, (list, tuple)):
            continue
        kept = [operand for operand in operands if not _is_empty(operand)]
        if len(kept) == 1 and isinstance(kept[0], fx.Node) and _kind(kept[0]) == _kind(node):
            node.replace_all_uses_with(kept[0])
            graph.erase_node(node)
        elif 1 < len(kept) < len(operands):
            node.args = (kept, *node.args[1:])


def _is_empty(operand: object) -> bool:
    value = operand.meta.get("val") if isinstance(operand, fx.Node) else None
    return isinstance(value, Tensor) and value.ndim == 1 and type(value.shape[0]) is int and value.shape[0] == 0


def _kind(node: fx.Node) -> tuple[object, ...]:
    """Dtype and number of axes: an operand that is skipped may still promote the dtype."""
    value = node.meta.get("val")
    return (value.dtype, value.ndim) if isinstance(value, Tensor) else ()
