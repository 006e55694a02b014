"""A copy of a model that runs its own Python and calls captured graphs, islands, in place of some submodules."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

TABLES = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, (dict, set)))
"""Attributes of every module that hold its members and hooks."""


def with_islands(model: nn.Module, islands: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """A copy of ``model`` that calls ``islands[module]`` where the original calls ``module``.

    Only the module objects are copied; parameters, buffers and plain attributes are shared. A shared module has one
    copy. Attributes and hooks that hold modules of the tree, directly, in lists or dicts, or as bound methods, hold
    their copies.
    """
    copies: dict[nn.Module, nn.Module] = dict(islands)

    def copied(module: nn.Module) -> nn.Module:
        if module in copies:
            return copies[module]
        if isinstance(module, torch.jit.ScriptModule):
            return copies.setdefault(module, module.__copy__())
        twin = copies[module] = type(module).__new__(type(module))
        twin.__dict__.update(module.__dict__)
        twin.__dict__.update({name: module.__dict__[name].copy() for name in TABLES if name in module.__dict__})
        for name, child in module._modules.items():
            twin._modules[name] = None if child is None else copied(child)
        return twin

    root = copied(model)
    for module, twin in copies.items():
        if module not in islands and twin is not module:
            for name, value in twin.__dict__.items():
                if name not in TABLES:
                    twin.__dict__[name] = _replaced(value, copies)
                elif isinstance(value, dict):
                    value.update({key: _replaced(item, copies) for key, item in value.items()})
    return root


def _replaced(value: Any, copies: Mapping[nn.Module, nn.Module], around: tuple[object, ...] = ()) -> Any:
    """``value`` with modules replaced by their copies; itself if it holds none. ``around``: the containers it is in."""
    if isinstance(value, nn.Module):
        return copies.get(value, value)
    if isinstance(value, MethodType):
        owner = _replaced(value.__self__, copies, around)
        return value if owner is value.__self__ else MethodType(value.__func__, owner)
    if isinstance(value, partial):
        held = (value.func, value.args, value.keywords)
        func, args, keywords = replaced = tuple(_replaced(item, copies, around) for item in held)
        return value if all(map(operator.is_, replaced, held)) else partial(func, *args, **keywords)
    if type(value) not in (list, tuple, dict, OrderedDict) or any(value is other for other in around):
        return value
    items = list(value.values() if isinstance(value, dict) else value)
    new_items = [_replaced(item, copies, (*around, value)) for item in items]
    if all(map(operator.is_, new_items, items)):
        return value
    return type(value)(zip(value, new_items, strict=True) if isinstance(value, dict) else new_items)
