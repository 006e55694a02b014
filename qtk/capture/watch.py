"""The places of a model that code was read from."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import nn

from qtk.torch_private import GLOBAL_HOOKS, HOOK_TABLES

_GET = dict.get


class Watch:
    """Places in tables of modules, with the objects that were there, and tables of hooks, which were empty.

    >>> net, watch = nn.Sequential(nn.ReLU()), Watch()
    >>> watch.module(net, "0")
    ReLU()
    >>> before = watch.holds()
    >>> net[0] = nn.Tanh()
    >>> before, watch.holds()
    (True, False)
    """

    def __init__(self) -> None:
        self._tables: list[Mapping[str, Any]] = []
        self._keys: list[str] = []
        self._objects: list[object] = []
        self._typed: list[nn.Module] = []
        self._types: list[type] = []
        self._hooks: list[Mapping[int, object]] = list(GLOBAL_HOOKS)
        self._known: set[tuple[int, str]] = set()

    def holds(self) -> bool:
        """Whether the objects are where they were, and there are no hooks."""
        return not any(self._hooks) and all(
            map(operator.is_, map(_GET, self._tables, self._keys), self._objects)  # type: ignore[arg-type]
        ) and all(map(operator.is_, map(type, self._typed), self._types))

    def add(self, table: Mapping[str, Any], key: str) -> None:
        """Adds a place in a table, empty or not."""
        if (id(table), key) not in self._known:
            self._known.add((id(table), key))
            self._tables.append(table)
            self._keys.append(key)
            self._objects.append(table.get(key))

    def add_type(self, module: nn.Module) -> None:
        """Adds the class of a module, which parametrizations and wrappers change."""
        self._typed.append(module)
        self._types.append(type(module))

    def add_hooks(self, root: nn.Module) -> None:
        """Adds the hooks of ``root`` and of the modules in it."""
        self._hooks += [getattr(module, name) for module in root.modules() for name in HOOK_TABLES]

    def module(self, root: nn.Module, path: str) -> nn.Module:
        """The module at a path, all steps of which are added. Raises: LookupError if a step is no module."""
        for name in filter(None, path.split(".")):
            table: Mapping[str, Any] = root._modules if name in root._modules else vars(root)
            self.add(table, name)
            root = table[name]
            if not isinstance(root, nn.Module):
                raise LookupError(path)
        return root
