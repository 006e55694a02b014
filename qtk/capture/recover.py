"""Replaces marker ops, fused recurrent ops and attention by modules with the original's train and eval behaviour."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence

import torch
from torch import fx, nn

from qtk.capture.composites import composite_of
from qtk.capture.holders import free_name, holder
from qtk.capture.markers import BATCH_NORM, DETACH, DROPOUT, INSTANCE_NORM
from qtk.nn.batch_norm import BatchNorm
from qtk.nn.dropout import Dropout
from qtk.nn.instance_norm import InstanceNorm
from qtk.torch_private import BatchNormBase


def recover(root: nn.Module, graph: fx.Graph, original: nn.Module) -> tuple[tuple[str, int], ...]:
    """Replaces every marker op, recurrent op and attention op in ``graph`` by a module, added to ``root``.

    Returns: how many modules were recovered, by kind.
    """
    recovered = Counter[str]()
    for node in list(graph.nodes):
        if node.target is DETACH:
            node.target = torch.ops.aten.detach.default
            continue
        if node.target is DROPOUT:
            kind, (module, arguments) = "dropout", _dropout(node)
        elif node.target is BATCH_NORM:
            kind, (module, arguments) = "batch_norm", _batch_norm(node, root, original)
        elif node.target is INSTANCE_NORM:
            kind, (module, arguments) = "instance_norm", _instance_norm(node)
        elif (composite := composite_of(node, _owner(node, original))) is not None:
            kind, module, arguments = composite.name, composite.module, composite.arguments
            if composite.single:
                node = _element_of(node)
        else:
            continue
        recovered[kind] += 1
        _replace(node, root, kind, module, arguments)
    return tuple(sorted(recovered.items()))


def _dropout(node: fx.Node) -> tuple[nn.Module, Sequence[fx.node.Argument]]:
    x, p, train, kind = node.args  # captured in eval mode: a dropout that is on is always on
    return Dropout(kind, p, always=bool(train)), (x,)  # type: ignore[arg-type]


def _batch_norm(
    node: fx.Node, root: nn.Module, original: nn.Module
) -> tuple[nn.Module, Sequence[fx.node.Argument]]:
    x, weight, bias, mean, var, by_batch, momentum, eps, _ = node.args
    owner = _owner(node, original)
    if isinstance(owner, BatchNormBase) and owner.momentum is None:
        momentum = None  # a cumulative average, of which export shows a weight of 0
    module = BatchNorm(momentum, eps, always_batch_statistics=bool(by_batch))  # type: ignore[arg-type]
    return module, (x, weight, bias, mean, var, _batches_tracked(root, mean))


def _instance_norm(node: fx.Node) -> tuple[nn.Module, Sequence[fx.node.Argument]]:
    *tensors, _, momentum, eps, _ = node.args
    return InstanceNorm(momentum, eps), tensors  # type: ignore[arg-type]


def _batches_tracked(root: nn.Module, mean: fx.node.Argument) -> fx.Node | None:
    """A new node that reads ``num_batches_tracked`` of the batch norm with this running mean, ``None`` without one."""
    if not isinstance(mean, fx.Node) or mean.op != "get_attr":
        return None
    owner = str(mean.target).rpartition(".")[0]
    counter = getattr(holder(root, owner), "num_batches_tracked", None)
    if not isinstance(counter, torch.Tensor):
        return None
    name = f"{owner}.num_batches_tracked" if owner else "num_batches_tracked"
    with mean.graph.inserting_before(mean):
        node = mean.graph.create_node("get_attr", name)
    node.meta["val"] = mean.meta["val"].fake_mode.from_tensor(counter)
    return node


def _element_of(node: fx.Node) -> fx.Node:
    """Makes ``node`` a tuple of one and lets its users read the element. Returns: ``node``."""
    with node.graph.inserting_after(node):
        element = node.graph.call_function(operator.getitem, (node, 0))
    element.meta = dict(node.meta)
    node.replace_all_uses_with(element, delete_user_cb=lambda user: user is not element)
    node.meta["val"] = (node.meta["val"],)
    return node


def _owner(node: fx.Node, original: nn.Module) -> nn.Module:
    """The module whose forward calls the op of ``node``; ``original`` if it has no such submodule."""
    try:
        return original.get_submodule(_owner_path(node))
    except AttributeError:
        return original


def _replace(
    node: fx.Node, root: nn.Module, name: str, module: nn.Module, arguments: Sequence[fx.node.Argument]
) -> None:
    target = free_name(root, ".".join(filter(None, (_owner_path(node), name))))
    owner, _, leaf = target.rpartition(".")
    holder(root, owner).add_module(leaf, module)
    with node.graph.inserting_before(node):
        call = node.graph.create_node("call_module", target, tuple(arguments))
    call.meta = dict(node.meta)
    node.replace_all_uses_with(call)
    node.graph.erase_node(node)


def _owner_path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    paths = [value[0].partition("@")[0] for key, value in stack.items() if not key.startswith("_empty")]
    return paths[-1] if paths else ""
