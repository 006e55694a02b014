"""Looks up the attribute or module that the target of a node names, and the path that users know it by."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from qtk.nn.batch_norm import batch_norm
from qtk.nn.kept_batch_norm import kept_batch_norm
from qtk.nn.recurrent import Recurrent
from qtk.nn.train_only import train_only

MEMBERS = "qtk_members"
"""The attribute by which a graph reads those members of the original whose names ``fx.GraphModule`` or a prepared model
uses itself: the weight of a child called ``graph`` is the target ``qtk_members.graph.weight``."""


def path_of(target: object) -> str:
    """The path of what a target names, as in the original model.

    >>> path_of("qtk_members.graph.weight"), path_of("fc.weight"), path_of("qtk_members")
    ('graph.weight', 'fc.weight', '')
    """
    path = str(target)
    return "" if path == MEMBERS else path.removeprefix(f"{MEMBERS}.")


def attribute(root: nn.Module, path: str) -> Any:
    """The attribute of ``root`` at a dotted path such as ``encoder.0.weight``.

    Raises: AttributeError if it does not exist.
    """
    owner, _, leaf = path.rpartition(".")
    return getattr(root.get_submodule(owner), leaf)


def called_module(node: fx.Node) -> nn.Module | None:
    """The module that ``node`` calls; ``None`` if it calls none, or no module owns its graph."""
    owner = node.graph.owning_module
    return owner.get_submodule(str(node.target)) if node.op == "call_module" and owner is not None else None


def batch_norm_called(node: fx.Node) -> nn.Module | None:
    """The module by whose settings the batch norm of ``node`` normalises; ``None`` if it calls none."""
    return _module_read(node, 6) if node.target is batch_norm else None


def kept_batch_norm_called(node: fx.Node) -> nn.Module | None:
    """The same for a batch norm that is live until the export."""
    return _module_read(node, 6) if node.target is kept_batch_norm else None


def train_only_called(node: fx.Node) -> nn.Module | None:
    """The module that acts in train mode only and that ``node`` calls; ``None`` if it calls none."""
    return _module_read(node, 1) if node.target is train_only else None


def _module_read(node: fx.Node, index: int) -> nn.Module:
    read, owner = node.args[index], node.graph.owning_module
    assert isinstance(read, fx.Node)
    assert owner is not None
    module = attribute(owner, str(read.target))
    assert isinstance(module, nn.Module)
    return module


BATCH_SIZES = 4
"""Argument of ``Recurrent`` with the batch sizes of a packed sequence."""


def packed_call(node: fx.Node) -> bool:
    """Whether ``node`` calls a recurrent net with a packed sequence."""
    return isinstance(called_module(node), Recurrent) and len(node.args) > BATCH_SIZES
