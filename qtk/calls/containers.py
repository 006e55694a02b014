"""Containers of tensors among the arguments and results of a model: caches, dataclasses, classes of the user.

Torch looks into a class that is registered as a pytree node. What it does not know is one opaque value, and a graph has
no place for it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from types import MappingProxyType

import torch
from torch import Tensor, nn

from qtk.errors import CaptureError
from qtk.torch_private import branches, fx_pytree, pytree

TRANSFORMERS = "transformers"
"""The package whose caches are registered by its own function, where it is loaded; it is never loaded for that."""

PER_CLASS = ("exporters.exporter_dynamo", "register_pytree_node")
"""Module and name of its function for any class of caches."""

OF_CLASS = MappingProxyType({
    "DynamicCache": ("integrations.executorch", "register_dynamic_cache_export_support"),
})
"""Class of caches → its function for that class alone, in versions without the other."""


def register_containers(tree: object) -> Iterator[str]:
    """Lets torch look into the dataclasses and the caches of ``transformers`` in ``tree``. Yields: a note for each."""
    for leaf in pytree.tree_leaves(tree):
        kind = type(leaf)
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            if kind not in pytree.SUPPORTED_NODES:  # an instance before made it known
                torch.export.register_dataclass(kind)
                yield f"{kind.__name__} is now known to torch's pytree as a dataclass"
            yield from register_containers([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
        elif is_cache(leaf) and _register_cache(kind):
            yield f"{kind.__name__} is now known to torch's pytree, by {TRANSFORMERS}' own function"


def is_cache(value: object) -> bool:
    """Says whether a value is a cache of ``transformers``, or of a class derived from one."""
    return _is_cache_class(type(value))


def _is_cache_class(kind: type) -> bool:
    base = getattr(sys.modules.get(TRANSFORMERS), "Cache", None)
    return isinstance(base, type) and issubclass(kind, base)


def _register_cache(kind: type) -> bool:
    """Registers a class of caches. Returns: whether there was a function for it."""
    names = [base.__name__ for base in kind.__mro__]
    for module, function in (PER_CLASS, *(OF_CLASS[name] for name in names[:1] if name in OF_CLASS)):
        try:
            register: Callable[..., object] = getattr(import_module(f"{TRANSFORMERS}.{module}"), function)
        except (ImportError, AttributeError):
            continue
        register(kind) if (module, function) == PER_CLASS else register()
        flatten_without_comparing(kind)
        return True
    return False


def register_structure(structure: pytree.TreeSpec | None) -> None:
    """Lets torch look into the caches of ``transformers`` in a structure that was made by another process.

    Raises: CaptureError naming a class that nobody has registered in this process.
    """
    if structure is None:
        return
    kind = structure.type
    is_known = not isinstance(kind, type) or kind in pytree.SUPPORTED_NODES
    if not is_known and not (_is_cache_class(kind) and _register_cache(kind)):
        raise CaptureError(f"a graph that is loaded takes or returns {kind.__qualname__} of {kind.__module__}, which "
                           "is no pytree node in this process; before loading, import the module that registers it, or "
                           "run the same torch.utils._pytree.register_pytree_node as before preparing")
    for branch in branches(structure):
        register_structure(branch)


def flatten_without_comparing(kind: type) -> None:
    """Lets generated code take instances of a registered class apart without comparing what is no tensor: a device."""
    node = pytree.SUPPORTED_NODES.get(kind)
    if node is not None and kind not in fx_pytree.SUPPORTED_NODES:
        fx_pytree.register_pytree_flatten_spec(kind, lambda value, _: list(node.flatten_fn(value)[0]))


def unregistered(tree: object) -> dict[str, type]:
    """Name → class of the values in ``tree`` that hold tensors and that torch cannot look into.

    >>> class Memory:
    ...     def __init__(self):
    ...         self.keys = torch.zeros(2)
    >>> list(unregistered({"memory": Memory(), "x": torch.zeros(2)}))
    ['Memory']
    """
    kinds: dict[str, type] = {}
    for leaf in pytree.tree_leaves(tree):
        if not isinstance(leaf, (Tensor, nn.Module, type)) and not callable(leaf) and _holds_tensors(leaf):
            kinds.setdefault(type(leaf).__qualname__, type(leaf))
    return kinds


def _holds_tensors(value: object, depth: int = 4) -> bool:
    if isinstance(value, Tensor):
        return True
    held = [leaf for leaf in pytree.tree_leaves(getattr(value, "__dict__", None)) if leaf is not value]
    return any(isinstance(leaf, Tensor) for leaf in held) or (
        depth > 0 and any(_holds_tensors(leaf, depth - 1) for leaf in held if not isinstance(leaf, nn.Module)))


def registration_text(tree: object) -> str | None:
    """Says how to register the classes in ``tree`` that torch cannot look into; ``None`` if there are none."""
    kinds = unregistered(tree)
    if not kinds:
        return None
    name = next(iter(kinds))
    return (f"{', '.join(kinds)} {'is no pytree node' if len(kinds) == 1 else 'are no pytree nodes'}, so no graph can "
            f"take or return it; before preparing, run torch.utils._pytree.register_pytree_node({name}, "
            "lambda value: (its tensors in a list, what else rebuilds it), lambda tensors, rest: the same value, "
            "flatten_with_keys_fn=lambda value: ([(SequenceKey(index), tensor) …], the same rest))")
