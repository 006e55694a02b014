"""Looks up the attribute or module that the target of a node names, and the path that users know it by."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

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
