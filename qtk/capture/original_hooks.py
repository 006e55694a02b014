"""Hooks that the original of a prepared model carries and the prepared model does not call."""

from __future__ import annotations

import functools
import warnings

from torch import nn

from qtk.capture.prepared_model import PreparedGraph, PreparedModel
from qtk.torch_private import HOOK_TABLES

LISTED = 5
"""Hooks that the warning lists."""

CAPTURED = "torch.nn.utils"
"""Where hooks come from that compute parameters (weight norm, spectral norm, pruning): ops, which the graph holds."""


def warn_of_hooks(original: nn.Module, prepared: PreparedModel) -> None:
    """Warns of the hooks of ``original`` that a call of ``prepared`` does not call."""
    lost = [
        f"{kind} {_name(hook)} of {path or 'the model'}"
        for path, module in original.named_modules()
        if path or isinstance(prepared, PreparedGraph)  # a model that keeps its Python keeps its own hooks
        for table, kind in HOOK_TABLES.items()
        for key, hook in getattr(module, table, {}).items()
        if key not in getattr(prepared.get_submodule(path), table) and not _is_captured(hook)
    ]
    if lost:
        more = f" and {len(lost) - LISTED} more" if len(lost) > LISTED else ""
        warnings.warn(
            f"hooks of the original that will not be called: {', '.join(lost[:LISTED])}{more}; the prepared model runs "
            "its graph, in which what they computed at capture stands as it was; register them on sim.model, or on the "
            "modules of qtk.block_view, which are called", stacklevel=3,
        )


def _name(hook: object) -> str:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))


def _is_captured(hook: object) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    owner = getattr(hook, "__self__", hook)
    return any(kind.__module__.startswith(CAPTURED) for kind in type(owner).__mro__)
