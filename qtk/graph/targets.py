"""Looks up the attribute or module that the target of a node names."""

from __future__ import annotations

from typing import Any

from torch import fx, nn


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
