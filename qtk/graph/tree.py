"""A model's own Python around captured graphs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

TABLES = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, (dict, set)))
"""Attributes of every module that hold its members and hooks."""


def with_islands(model: nn.Module, islands: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """A copy of ``model`` that calls ``islands[module]`` where the original calls ``module``.

    Only the tree is copied: parameters, buffers and plain attributes are the original's own objects. A module with
    two names has one copy.
    """
    copies: dict[nn.Module, nn.Module] = dict(islands)

    def copied(module: nn.Module) -> nn.Module:
        if module in copies:
            return copies[module]
        if isinstance(module, torch.jit.ScriptModule):
            return copies.setdefault(module, module)
        twin = copies[module] = type(module).__new__(type(module))
        twin.__dict__.update(module.__dict__)
        twin.__dict__.update({name: module.__dict__[name].copy() for name in TABLES if name in module.__dict__})
        for name, child in module._modules.items():
            twin._modules[name] = None if child is None else copied(child)
        return twin

    return copied(model)
