"""Tensors that a module holds from its last forward: the state of a stream, a cache."""

from __future__ import annotations

import operator
from collections import OrderedDict

import torch
from torch import Tensor, nn

from qtk.capture.restored import TABLES
from qtk.torch_private import base_of


def own_tensors(model: nn.Module) -> None:
    """Makes plain tensors of buffers and attributes that a forward assigned.

    Autograd lets nothing be written to some views and to no tensor of inference mode, and no result with a history can
    be copied. What replaces these has the same memory, but for tensors of inference mode.

    >>> module = nn.Module()
    >>> module.state = (torch.ones(2, requires_grad=True) * 3)[1:]
    >>> own_tensors(module)
    >>> module.state
    tensor([3.])
    """
    owned: dict[int, tuple[Tensor, Tensor]] = {}  # with what was replaced, whose ids stay its own
    for module in model.modules():
        if not isinstance(module, torch.jit.ScriptModule):
            _own(module._buffers, owned)
            for name, value in vars(module).items():
                if name not in TABLES:
                    vars(module)[name] = _own(value, owned)


def _own(value: object, owned: dict[int, tuple[Tensor, Tensor]]) -> object:
    """Returns what replaces ``value``; lists and dicts stay, with other items."""
    if isinstance(value, Tensor):
        if value.is_inference():
            return owned.setdefault(id(value), (value, value.clone()))[1]
        if value.grad_fn is not None or base_of(value) is not None:
            return owned.setdefault(id(value), (value, value.detach()))[1]
    elif type(value) is tuple:
        items = tuple(_own(item, owned) for item in value)
        return value if all(map(operator.is_, items, value)) else items
    elif type(value) is list:
        value[:] = [_own(item, owned) for item in value]
    elif isinstance(value, dict) and type(value) in (dict, OrderedDict):
        value.update({key: _own(item, owned) for key, item in value.items()})
    return value
