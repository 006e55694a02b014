"""The places of a model that code was read from."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from qtk.torch_private import CALL_ATTRIBUTES, GLOBAL_HOOKS, HOOK_TABLES, MODULE_TABLES

_GET, _CONTAINS, _FORWARD = dict.get, dict.__contains__, operator.attrgetter("forward")


class Watch:
    """Places in tables of modules, with the objects that were there, and tables of hooks, which were empty.

    What libraries put in the place of a call is seen: a ``forward``, compiled code, a class.

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
        self._members: list[Mapping[str, Any]] = []
        self._names: list[str] = []
        self._typed: list[nn.Module] = []
        self._types: list[type] = []
        self._forwards: dict[type, Callable[..., Any]] = {}
        self._hooks: list[Mapping[int, object]] = list(GLOBAL_HOOKS)
        self._known: set[tuple[int, str]] = set()

    def holds(self) -> bool:
        """Says whether the objects are where they were, and there are no hooks."""
        return not any(self._hooks) and all(
            map(operator.is_, map(_GET, self._tables, self._keys), self._objects)  # type: ignore[arg-type]
        ) and all(map(_CONTAINS, self._members, self._names)) and all(
            map(operator.is_, map(type, self._typed), self._types)
        ) and all(map(operator.is_, map(_FORWARD, self._forwards), self._forwards.values()))

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

    def add_call(self, module: nn.Module) -> None:
        """Adds what a call of a module runs, for a module whose code is written in place of its call."""
        for name in CALL_ATTRIBUTES:
            self.add(vars(module), name)
        self.add_type(module)
        self._forwards[type(module)] = _FORWARD(type(module))

    def member(self, owner: nn.Module, name: str) -> dict[str, Any]:
        """The table of ``owner`` that has a member, which may be another object later.

        Raises: LookupError if none has it.
        """
        self.add_type(owner)
        for key in MODULE_TABLES:
            table: dict[str, Any] = vars(owner)[key]
            if name in table:
                self.add(vars(owner), key)
                self.add(vars(owner), name)  # would hide it
                break
        else:
            table = vars(owner)
            if name not in table:
                raise LookupError(name)
        self._members.append(table)
        self._names.append(name)
        return table

    def add_hooks(self, root: nn.Module) -> None:
        """Adds the hooks of ``root`` and of the modules in it."""
        self._hooks += [getattr(module, name) for module in root.modules() for name in HOOK_TABLES]

    def module(self, root: nn.Module, path: str) -> nn.Module:
        """The module at a path, all steps of which are added. Raises: LookupError if a step is no module."""
        for name in filter(None, path.split(".")):
            table: Mapping[str, Any] = root._modules if name in root._modules else vars(root)
            self.add(vars(root), "_modules")
            self.add(table, name)
            root = table[name]
            if not isinstance(root, nn.Module):
                raise LookupError(path)
        return root
