"""Replaces marker ops, fused recurrent ops and attention by calls with the original's train and eval behaviour."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx, nn

from qtk.capture.composites import composite_of
from qtk.capture.holders import Holder, free_name, holder, keep_type
from qtk.capture.recurrent_tracing import PAD
from qtk.capture.scans import SCAN
from qtk.capture.train_mode.markers import BATCH_NORM, DETACH, DROPOUT, INSTANCE_NORM, MODULE
from qtk.capture.train_mode.train_only import TrainOnly
from qtk.graph.captured_graph import ACTING
from qtk.graph.sites import BY_SCAN, EXCLUDED, add_labels
from qtk.nn.batch_norm import BatchNorm, batch_norm
from qtk.nn.dropout import Dropout
from qtk.nn.instance_norm import InstanceNorm
from qtk.nn.scan import Scan
from qtk.nn.train_only import train_only
from qtk.operators.targets import attribute, module_calls, path_of
from qtk.torch_private import BatchNormBase, DropoutBase


def recover(
    root: nn.Module, graph: fx.Graph, original: nn.Module, acting: TrainOnly, scans: Sequence[Scan] = ()
) -> tuple[tuple[str, int], ...]:
    """Replaces every marker op, recurrent op and attention op in ``graph`` by the call of a module in ``root``.

    Batch norms and train-only modules keep their place and class, of which the graph reads the module; for the others
    one of qtk's is added.

    Args:
        root: the tree of holders. Changed.
        graph: the graph. Changed.
        original: the module that was captured.
        acting: its train-only modules.
        scans: the recurrences in it, by the number in their marker op.

    Returns: how many modules were recovered, by kind.
    """
    recovered = Counter[str]()
    for node in list(graph.nodes):
        if node.target is DETACH:
            node.target = torch.ops.aten.detach.default
            continue
        if node.target is PAD:
            node.target, node.args = torch.ops.aten._pad_packed_sequence.default, node.args[:5]
            continue
        if node.target is DROPOUT:
            kind, (module, arguments) = "dropout", _dropout(node)
        elif node.target is BATCH_NORM:
            recovered["batch_norm"] += 1
            _batch_norm(node, root, original)
            continue
        elif node.target is MODULE:
            recovered[_train_only(node, root, original, acting)] += 1
            continue
        elif _drops_weights(node, _owner(node, original)):
            recovered["dropout"] += 1
            _drop_weights(node, root, original)
            continue
        elif node.target is INSTANCE_NORM:
            kind, (module, arguments) = "instance_norm", _instance_norm(node)
        elif node.target is SCAN:
            tensors, lengths, *_, index = node.args
            kind, module, arguments = "scan", scans[index], (*tensors, *lengths)
            add_labels(node, **{EXCLUDED: BY_SCAN})
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


def _batch_norm(node: fx.Node, root: nn.Module, original: nn.Module) -> None:
    """Calls ``batch_norm`` with the settings of the module that owns the parameters, or of a new one."""
    x, weight, bias, mean, var, by_batch, momentum, eps, _ = node.args
    owner, path, counter = _owner(node, original), _owner_path(node), None
    is_own = isinstance(owner, BatchNormBase) and path and eps == owner.eps and all(
        tensor is None if getattr(owner, name) is None else _read(root, tensor) is getattr(owner, name)
        for name, tensor in (("weight", weight), ("bias", bias), ("running_mean", mean), ("running_var", var))
    ) and bool(by_batch) == (mean is None) and momentum == (owner.momentum or 0.0)
    if is_own:
        keep_type(root, path, owner, runs=False)
    else:
        if isinstance(owner, BatchNormBase) and owner.momentum is None:
            momentum = None  # a cumulative average, of which export shows a weight of 0
        module = BatchNorm(momentum, eps, always_batch_statistics=bool(by_batch))  # type: ignore[arg-type]
        path, counter = _add(node, root, "batch_norm", module), _batches_tracked(root, mean)
    _call(node, batch_norm, (x, weight, bias, mean, var, counter), path)


def _read(root: nn.Module, node: fx.node.Argument) -> object:
    """The member that a node reads; ``None`` if it reads none."""
    return attribute(root, path_of(node.target)) if isinstance(node, fx.Node) and node.op == "get_attr" else None


def _train_only(node: fx.Node, root: nn.Module, original: nn.Module, acting: TrainOnly) -> str:
    """Calls a train-only module. Returns: its kind."""
    x, path = node.args
    module = original.get_submodule(str(path))
    keep_type(root, str(path), module, runs=True)
    _call(node, train_only, (x,), str(path), acting[module])
    return "dropout" if isinstance(module, DropoutBase) else type(module).__name__


def _drops_weights(node: fx.Node, owner: nn.Module) -> bool:
    """Says whether ``node`` makes attention weights of an ``nn.MultiheadAttention`` with dropout in train mode."""
    is_softmax = node.target in (torch.ops.aten.softmax.int, torch.ops.aten._softmax.default)
    return is_softmax and isinstance(owner, nn.MultiheadAttention) and owner.dropout > 0


def _drop_weights(node: fx.Node, root: nn.Module, original: nn.Module) -> None:
    """Drops attention weights: the code in torch leaves the op out in eval mode."""
    owner = _owner(node, original)
    assert isinstance(owner, nn.MultiheadAttention)
    target = _add(node, root, "dropout", Dropout("dropout", owner.dropout))
    with node.graph.inserting_after(node):
        call = node.graph.create_node("call_module", target, (node,))
    call.meta = dict(node.meta)
    node.replace_all_uses_with(call, delete_user_cb=lambda user: user is not call)


def _call(
    node: fx.Node, function: Callable[..., Tensor], arguments: Sequence[fx.node.Argument], path: str, *settings: bool
) -> None:
    """Replaces ``node`` by a call of ``function`` with ``arguments``, the module at ``path``, and ``settings``."""
    with node.graph.inserting_before(node):
        module = node.graph.create_node("get_attr", path)
        call = node.graph.call_function(function, (*arguments, module, *settings))
    call.meta = dict(node.meta)
    node.replace_all_uses_with(call)
    node.graph.erase_node(node)


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
    target = _add(node, root, name, module)
    with node.graph.inserting_before(node):
        call = node.graph.create_node("call_module", target, tuple(arguments))
    call.meta = dict(node.meta)
    node.replace_all_uses_with(call)
    node.graph.erase_node(node)


def _add(node: fx.Node, root: nn.Module, name: str, module: nn.Module) -> str:
    """Adds ``module`` to the module that calls the op of ``node``. Returns: its path."""
    target = free_name(root, ".".join(filter(None, (_owner_path(node), name))))
    owner, _, leaf = target.rpartition(".")
    for child in holder(root, owner).children():  # a dropout whose probability the code of the owner reads
        if hasattr(module, "p") and isinstance(child, Holder):
            child.__dict__.setdefault(ACTING, {"p": f"{target}.p"})
    holder(root, owner).add_module(leaf, module)
    return target


def _owner_path(node: fx.Node) -> str:
    around = module_calls(node)
    return around[-1].path if around else ""
