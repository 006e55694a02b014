"""What a cache of ``transformers`` is made of, so that generated code makes one without reading its description."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qtk.calls.containers import TRANSFORMERS, is_cache
from qtk.torch_private import pytree

PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
"""Types of values that a copy may share."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor, by its number among the leaves."""

    number: int


@dataclass(frozen=True, slots=True)
class Parts:
    """An object as its class and its attributes: of tensors the numbers, of other objects the parts."""

    kind: type[Any]
    state: dict[str, Any]

    @staticmethod
    def make(kind: type[Any], state: Mapping[str, object]) -> object:
        """An instance of a class with these attributes."""
        instance: object = object.__new__(kind)
        vars(instance).update(state)
        return instance


def parts_of(spec: pytree.TreeSpec) -> Parts | None:
    """The parts of a cache that is nested as ``spec``; ``None`` of another class, or if it holds what is not known.

    Transformers' own function takes a cache apart into tensors, so that these are the children of ``spec``, and reads
    no tensor when it makes one.
    """
    node = pytree.SUPPORTED_NODES.get(spec.type)
    if node is None or not str(node.unflatten_fn.__module__).startswith(f"{TRANSFORMERS}."):
        return None
    leaves = [torch.empty(0) for _ in range(spec.num_children)]
    value = node.unflatten_fn(leaves, spec.context)
    if not is_cache(value):
        return None
    found = {id(leaf): Leaf(number) for number, leaf in enumerate(leaves)}
    try:
        parts: Parts = _taken_apart(value, found, set())
    except TypeError:
        return None
    return parts


def _taken_apart(value: Any, leaves: Mapping[int, Leaf], seen: set[int]) -> Any:
    """Raises: TypeError for a value that is not known, or that is held twice."""
    if id(value) in leaves:
        return leaves[id(value)]
    kind = type(value)
    if kind in PLAIN or isinstance(value, type):
        return value
    if id(value) in seen:
        raise TypeError("held twice")
    seen.add(id(value))
    if kind in (list, tuple):
        return kind(_taken_apart(each, leaves, seen) for each in value)
    if kind is dict:
        return {key: _taken_apart(each, leaves, seen) for key, each in value.items()}
    if isinstance(value, (Tensor, dict, list, tuple, set)) or not hasattr(value, "__dict__"):
        raise TypeError(f"holds a {kind.__name__}")
    return Parts(kind, {name: _taken_apart(each, leaves, seen) for name, each in vars(value).items()})
