"""What a node reads or calls: its attribute or module, the path that users know it by, its arguments by their names.

And the calls of modules around it, as torch.export notes them in its metadata.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from qtk.nn.batch_norm import batch_norm
from qtk.nn.kept_batch_norm import kept_batch_norm
from qtk.nn.recurrent import Recurrent
from qtk.nn.train_only import train_only
from qtk.torch_private import schema_of

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
    if node.op != "call_module" or (owner := node.graph.owning_module) is None:
        return None
    module: nn.Module | None = owner
    for name in str(node.target).split("."):  # a tenth of the time of ``get_submodule``, and asked thousands of times
        module = None if module is None else module._modules.get(name)
    return owner.get_submodule(str(node.target)) if module is None else module


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
    """Says whether ``node`` calls a recurrent net with a packed sequence."""
    return isinstance(called_module(node), Recurrent) and len(node.args) > BATCH_SIZES


def schema_arguments(node: fx.Node) -> dict[str, fx.node.Argument]:
    """Name → argument of an ATen call, defaults included."""
    return named_arguments(node, node.args, node.kwargs)


def named_arguments(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """As ``schema_arguments``, with ``args`` and ``kwargs`` in place of the arguments of ``node``."""
    schema = schema_of(node.target)
    assert schema is not None, f"{node} calls no op of torch"
    positional = dict(zip((argument.name for argument in schema.arguments), args, strict=False))
    return {argument.name: argument.default_value for argument in schema.arguments} | positional | dict(kwargs)


def aten_name(target: object) -> str | None:
    """``"add"`` for ``aten.add.Tensor``; other ops with their namespace; ``None`` if ``target`` is no op."""
    schema = schema_of(target)
    return None if schema is None else schema.name.removeprefix("aten::")


def clamp_bounds(node: fx.Node) -> tuple[float | None, float | None] | None:
    """The bounds of a clamp, a hardtanh or a rectifier; ``None`` if they are tensors."""
    rectified = {"relu": (0.0, None), "relu6": (0.0, 6.0)}.get(aten_name(node.target) or "")
    if rectified is not None:
        return rectified
    arguments: dict[str, Any] = schema_arguments(node)
    lower, upper = arguments.get("min", arguments.get("min_val")), arguments.get("max", arguments.get("max_val"))
    return None if isinstance(lower, fx.Node) or isinstance(upper, fx.Node) else (lower, upper)


MODULE_STACK = "nn_module_stack"
"""The entry of ``node.meta``: key of a call → (path of the module, its class), the outermost first."""

_LATER = re.compile(r"@\d+")


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of the module at ``path``; ``key`` differs between calls of one module."""

    path: str
    key: str
    is_first: bool


def module_calls(node: fx.Node) -> list[ModuleCall]:
    """The calls around an op, the outermost first; the call of the model itself has the path ``""``.

    Later calls of a module are marked in the key, or in the path by releases of torch before; frames of functions are
    left out.
    """
    return [
        ModuleCall(_LATER.sub("", path), key, not _LATER.search(key + path))
        for key, (path, _) in (node.meta.get(MODULE_STACK) or {}).items()
        if not key.startswith("_empty")
    ]
