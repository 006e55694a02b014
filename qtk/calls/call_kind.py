"""The kind of a call: which inputs are given, and what they are but their sizes and numbers. Each kind has a graph."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Mapping
from typing import Any, TypeAlias

from torch import Tensor, nn

from qtk.torch_private import pytree

Kind: TypeAlias = Hashable
"""Equal for calls that one graph can serve."""


def signature_of(module: nn.Module) -> inspect.Signature | None:
    """The signature of ``forward``; ``None`` if it has none, as code that is no Python."""
    try:
        return inspect.signature(module.forward)
    except (TypeError, ValueError):
        return None


def call_kind(signature: inspect.Signature | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Kind:
    """The kind of a call, however it is written: by position or by name, with defaults given or left out.

    >>> import torch
    >>> def forward(x, labels=None, scale=1.0): ...
    >>> signature, x = inspect.signature(forward), torch.ones(2, 3)
    >>> call_kind(signature, (x, None), {}) == call_kind(signature, (), {"scale": 1.0, "x": torch.ones(4, 7)})
    True
    >>> call_kind(signature, (x,), {}) == call_kind(signature, (x, torch.tensor([1, 0])), {})
    False

    Float dtypes are one, so that it survives ``model.half()``.
    """
    given = _given(signature, args, kwargs)
    return tuple((name, _kind_of(given[name])) for name in sorted(given))


def _given(signature: inspect.Signature | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Name → argument, of those that are not their default; what ``*args`` takes is named by its position."""
    parameters = {} if signature is None else signature.parameters
    names = [name for name, parameter in parameters.items()
             if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)]
    names += [f"*{index}" for index in range(len(names), len(args))]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return {name: value for name, value in given.items()
            if name not in parameters or not _is(value, parameters[name].default)}


def _is(value: object, default: object) -> bool:
    return value is default or (type(value) is type(default) and is_plain(value) and value == default)


def is_plain(value: object) -> bool:
    """Whether a value is a constant of the code that is captured."""
    return isinstance(value, (bool, int, float, str, type(None)))


def _kind_of(value: Any) -> Kind:
    if isinstance(value, Tensor):
        return "float" if value.is_floating_point() else str(value.dtype), value.ndim
    if is_plain(value):
        return type(value).__name__, value
    if isinstance(value, Mapping):
        return tuple((str(key), _kind_of(value[key])) for key in sorted(value, key=str))
    if isinstance(value, (list, tuple)):
        return tuple(_kind_of(item) for item in value)
    leaves, structure = pytree.tree_flatten(value)
    return repr(value) if len(leaves) == 1 and leaves[0] is value else (str(structure), *map(_kind_of, leaves))
