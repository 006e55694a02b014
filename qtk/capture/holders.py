"""A tree of plain ``nn.Module``s that holds a model's parameters and buffers under their original names.

Hooks on what it stands for are never called, which is said.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.utils.hooks import RemovableHandle

from qtk.capture.prepared_model import PreparedGraph, PreparedModel
from qtk.capture.tree import TABLES, with_islands
from qtk.graph.captured_graph import is_decided, without_effect
from qtk.graph.plain_attributes import PlainAttributes
from qtk.operators.targets import attribute, path_of
from qtk.torch_private import HOOK_TABLES, MODULE_TABLES


def _without_calls(register: Callable[..., RemovableHandle]) -> Callable[..., RemovableHandle]:
    """``register``, a method of ``nn.Module`` that adds a hook, with a warning if the module is never called."""

    @functools.wraps(register)
    def registered(holder: Holder, *args: Any, **kwargs: Any) -> RemovableHandle:
        if not holder._is_called():
            path = holder._path
            warnings.warn(
                f"{register.__name__} on {path!r}: the hook will never be called, for a prepared model runs its graph "
                f"and calls no {path!r}; put it on view.get_submodule({path!r}) of "
                f"view = qtk.block_view(sim, {path!r}), the same model with that module called", stacklevel=2,
            )
        return register(holder, *args, **kwargs)

    return registered


class Holder(nn.Module):
    """Holds members of a module whose code is in a graph, and refuses to be set what that code no longer reads.

    A hook on it, which is never called, is a warning.

    Args:
        path: of the module in its model.
        constants: see ``constants_of``.
        attributes: what can be read of the module.
    """

    def __init__(
        self, path: str = "", constants: frozenset[str] = frozenset(), attributes: PlainAttributes | None = None
    ) -> None:
        super().__init__()
        self._path, self._constants, self._attributes = path, constants, attributes

    def __getattr__(self, name: str) -> Any:
        """Raises: AttributeError saying where a member of the original is."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            attributes = self.__dict__.get("_attributes")
            if attributes is None or name.startswith("_"):
                raise
            return attributes.read(name)

    def _is_called(self) -> bool:
        return False

    def __setattr__(self, name: str, value: object) -> None:
        """Raises: CaptureError for a constant of the captured code."""
        if is_decided(self, name, self.__dict__.get("_constants", ())):
            raise without_effect(self, self._path, name)
        super().__setattr__(name, value)  # type: ignore[arg-type]

    register_forward_pre_hook = _without_calls(nn.Module.register_forward_pre_hook)
    register_forward_hook = _without_calls(nn.Module.register_forward_hook)
    register_full_backward_pre_hook = _without_calls(nn.Module.register_full_backward_pre_hook)
    register_full_backward_hook = _without_calls(nn.Module.register_full_backward_hook)
    register_backward_hook = _without_calls(nn.Module.register_backward_hook)


def constants_of(module: nn.Module) -> frozenset[str]:
    """The attributes of a module that capture has decided: plain ones, such as ``p``, and children."""
    if isinstance(module, torch.jit.ScriptModule):
        return frozenset()
    tables = {"training", "forward", *MODULE_TABLES}
    plain = [name for name in vars(module) if name[0] != "_" and name not in tables]
    return frozenset((*plain, *module._modules))


def keep_type(root: nn.Module, path: str, original: nn.Module, *, runs: bool) -> nn.Module:
    """The module at ``path`` as an instance of the class of ``original``, in the place of its holder. Changes ``root``.

    It has the members that the holder has, and the plain attributes of ``original``, but no hooks: what they do is in
    the graph.

    Args:
        root: the tree of holders.
        path: of the module.
        original: the module it holds the members of.
        runs: whether its own code will run, and needs its children as they are.
    """
    old = holder(root, path)
    if type(old) is type(original):
        return old
    twin = with_islands(original, {})
    fresh = vars(nn.Module())
    twin.__dict__.update({name: fresh[name] for name in TABLES if name not in MODULE_TABLES})
    if not runs:
        twin.__dict__.update({name: old.__dict__[name] for name in MODULE_TABLES})
    replace_module(root, old, twin)
    return twin


def forget_type(root: nn.Module, path: str) -> None:
    """Puts a holder in the place of the module at ``path``, which nothing calls any more. Changes ``root``."""
    old = holder(root, path)
    plain = Holder(path_of(path), constants_of(old), PlainAttributes(old))
    plain.__dict__.update({name: old.__dict__[name] for name in MODULE_TABLES})
    plain.training = old.training
    replace_module(root, old, plain)


def replace_module(root: nn.Module, old: nn.Module, new: nn.Module) -> None:
    for module in list(root.modules()):
        for name, child in module._modules.items():
            if child is old:
                module._modules[name] = new


def hold(original: nn.Module) -> nn.Module:
    """Builds a tree with the names, order and tensor objects of ``original``; a shared module is one holder."""
    root = nn.Module()
    holders = {original: root}
    for path, module in original.named_modules():
        holders.setdefault(module, Holder(path, constants_of(module), PlainAttributes(module)))
    for module, twin in holders.items():
        for name, child in module._modules.items():
            twin.add_module(name, None if child is None else holders[child])
        for name, parameter in module._parameters.items():
            twin.register_parameter(name, parameter)
        for name, buffer in module._buffers.items():
            twin.register_buffer(name, buffer, persistent=name not in module._non_persistent_buffers_set)
    return root


def hold_constants(root: nn.Module, captured: fx.GraphModule) -> None:
    """Adds the attributes that the graph of ``captured`` reads and the original did not register.

    Tensors become buffers outside the state_dict. Changes ``root``.
    """
    for node in captured.graph.nodes:
        if node.op != "get_attr":
            continue
        owner, _, leaf = str(node.target).rpartition(".")
        module = holder(root, owner)
        if not hasattr(module, leaf):
            value = attribute(captured, str(node.target))
            if isinstance(value, nn.Parameter):
                module.register_parameter(leaf, value)
            elif isinstance(value, torch.Tensor):
                module.register_buffer(leaf, value, persistent=False)
            else:
                setattr(module, leaf, value)


def holder(root: nn.Module, path: str) -> nn.Module:
    """The module at a path or target below ``root``; creates missing modules on the way. Changes ``root``."""
    for name in filter(None, path_of(path).split(".")):
        child = root._modules.get(name)
        if child is None:
            child = nn.Module()
            root.add_module(name, child)
        root = child
    return root


def free_name(root: nn.Module, path: str) -> str:
    """``path``, or the first of ``path_1``, ``path_2``, … that names nothing in ``root``."""
    owner, _, leaf = path.rpartition(".")
    module, name, ordinal = holder(root, owner), leaf, 0
    while hasattr(module, name):
        ordinal += 1
        name = f"{leaf}_{ordinal}"
    return f"{owner}.{name}" if owner else name


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
