"""The attributes, other than buffers, that forward changes: a graph holds what they were when it was captured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from qtk.torch_private import version_of

OF_TORCH = frozenset(vars(nn.Module()))
"""The attributes of every module, its tables of parameters, buffers, submodules and hooks among them."""


def noting_changes(model: nn.Module) -> Callable[[], tuple[str, ...]]:
    """A function that names the attributes of the modules of ``model`` that have changed since.

    Of numbers, texts, tensors, and of lists, tuples and dicts of these, the values count; of anything else which object
    it is.

    >>> class Count(nn.Module):
    ...     number = 0
    ...     def forward(self, x):
    ...         self.number += 1
    ...         return x * self.number
    >>> model = nn.Sequential(Count())
    >>> changed = noting_changes(model)
    >>> changed(), model(torch.ones(1)), changed()
    ((), tensor([1.]), ('0.number',))
    """
    modules = {
        path: module for path, module in model.named_modules() if not isinstance(module, torch.jit.ScriptModule)
    }
    before = {
        path: {name: _noted(value) for name, value in vars(module).items() if name not in OF_TORCH}
        for path, module in modules.items()
    }

    def changed() -> tuple[str, ...]:
        return tuple(
            f"{path}.{name}" if path else name for path, module in modules.items()
            for name, value in vars(module).items()
            if name not in OF_TORCH and not (name in before[path] and _is_same(before[path][name], value))
        )

    return changed


def _noted(value: object) -> object:
    match value:
        case Tensor():
            return value, version_of(value)
        case list() | tuple():
            return [_noted(item) for item in value]
        case dict():
            return {key: _noted(item) for key, item in value.items()}
    return value


def _is_same(before: object, value: object) -> bool:
    match value:
        case Tensor():
            return isinstance(before, tuple) and before[0] is value and before[1] == version_of(value)
        case list() | tuple():
            return isinstance(before, Sequence) and len(before) == len(value) and all(map(_is_same, before, value))
        case dict():
            return isinstance(before, Mapping) and before.keys() == value.keys() and all(
                _is_same(before[key], item) for key, item in value.items())
        case bool() | int() | float() | str():
            return before is value or (type(before) is type(value) and before == value)  # NaN is itself
    return before is value
