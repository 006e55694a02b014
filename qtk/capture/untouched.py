"""Restores a module's attributes, flags, buffers and RNG state on exit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

TABLES = ("_parameters", "_buffers", "_modules")

PARENT = "_parent"
"""The attribute of a ``PreparedTree`` with the module whose Python it runs, which is no submodule of it."""


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Restores attributes, training flags and buffer values of every module of ``model``, and the random state.

    Lists and dicts that are attributes get their items back, tensors that are attributes their values.
    """
    scripted = [module for module in model.modules() if isinstance(module, torch.jit.ScriptModule)]
    plain = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    behind = [vars(module).get(PARENT) for module in plain]
    plain += [parent for parent in behind if isinstance(parent, nn.Module)
              and not isinstance(parent, torch.jit.ScriptModule)]
    held = [value for module in plain for value in vars(module).values() if isinstance(value, Tensor)]
    restores = (_flags(scripted), _containers(plain), _attributes(plain), _values([*model.buffers(), *held]))
    with torch.random.fork_rng(devices=_cuda_devices(model)):
        try:
            yield
        finally:
            for restore in restores:
                restore()


def _flags(modules: Sequence[nn.Module]) -> Callable[[], None]:
    """Restores training flags, the only state of a scripted module that can be set."""
    flags = {module: module.training for module in modules}

    def restore() -> None:
        for module, training in flags.items():
            module.train(training)

    return restore


def _containers(modules: Sequence[nn.Module]) -> Callable[[], None]:
    """Restores the items of lists and dicts that are attributes."""
    held = [value for module in modules for name, value in vars(module).items() if name not in TABLES]
    lists = [(value, list(value)) for value in held if type(value) is list]
    dicts = [(value, dict(value)) for value in held if type(value) is dict]

    def restore() -> None:
        for some_list, items in lists:
            some_list[:] = items
        for some_dict, entries in dicts:
            _refill(some_dict, entries)

    return restore


def _attributes(modules: Sequence[nn.Module]) -> Callable[[], None]:
    """Restores attributes, and the tables of parameters, buffers and children."""
    attributes = {module: dict(vars(module)) for module in modules}
    tables = [(module, name, dict(vars(module)[name])) for module in modules for name in TABLES]

    def restore() -> None:
        for module, values in attributes.items():
            _refill(vars(module), values)
        for module, name, entries in tables:
            _refill(vars(module)[name], entries)

    return restore


def _values(tensors: Sequence[Tensor]) -> Callable[[], None]:
    values = {tensor: tensor.detach().clone() for tensor in tensors if not is_lazy(tensor)}

    @torch.no_grad()
    def restore() -> None:
        for tensor, value in values.items():
            if tensor.shape == value.shape:
                tensor.copy_(value)

    return restore


def _refill(table: dict[str, object], entries: dict[str, object]) -> None:
    table.clear()
    table.update(entries)


def _cuda_devices(model: nn.Module) -> list[int]:
    tensors = [*model.parameters(), *(buffer for buffer in model.buffers() if not is_lazy(buffer))]
    return sorted({tensor.device.index for tensor in tensors if tensor.device.type == "cuda"})
