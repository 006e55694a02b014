"""The calls of modules that an op belongs to, as torch.export notes them in a node's metadata."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import fx

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
    """The calls around an op, the outermost first; that of the model itself has the path ``""``.

    Later calls of a module are marked in the key, or in the path by releases of torch before; frames of functions are
    left out.
    """
    return [
        ModuleCall(_LATER.sub("", path), key, not _LATER.search(key + path))
        for key, (path, _) in (node.meta.get(MODULE_STACK) or {}).items()
        if not key.startswith("_empty")
    ]
