"""What a run changes in a module: restored on exit (attributes, flags, buffers and RNG state), or noted.

A graph holds the attributes that forward changes, buffers aside, as they were when it was captured.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from qtk.capture.written_parameters import is_plain, written_parameters
from qtk.torch_private import storage_of, version_of

TABLES = ("_parameters", "_buffers", "_modules")

PARENT = "_parent"
"""The attribute of a ``PreparedTree`` with the module whose Python it runs, which is no submodule of it."""


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Restores attributes, training flags and buffer values of every module of ``model``, and the random state.

    Parameters are restored that ``finding_written_parameters`` has found, and where another ``data`` was assigned.
    Lists and dicts that are attributes get their items back, tensors that are attributes their values.
    """
    scripted = [module for module in model.modules() if isinstance(module, torch.jit.ScriptModule)]
    plain = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    behind = [vars(module).get(PARENT) for module in plain]
    plain += [parent for parent in behind if isinstance(parent, nn.Module)
              and not isinstance(parent, torch.jit.ScriptModule)]
    held = [value for module in plain for value in vars(module).values() if isinstance(value, Tensor)]
    written = written_parameters(model).values()
    restores = (_flags(scripted), _containers(plain), _attributes(plain), _memory(model.parameters()),
                _values([*model.buffers(), *held, *written]))
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
    """Restores the items of lists and dicts that are attributes, the tables of hooks among them."""
    held = [value for module in modules for name, value in vars(module).items() if name not in TABLES]
    lists = [(value, list(value)) for value in held if type(value) is list]
    dicts = [(value, dict(value)) for value in held if type(value) in (dict, OrderedDict)]

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


def _memory(parameters: Iterable[Tensor]) -> Callable[[], None]:
    """Restores which memory parameters are in, without a copy of it."""
    data = [(parameter, parameter.data) for parameter in parameters if is_plain(parameter)]

    def restore() -> None:
        for parameter, before in data:
            if storage_of(parameter) != storage_of(before):
                parameter.data = before

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


OF_TORCH = frozenset(vars(nn.Module()))
"""The attributes of every module, its tables of parameters, buffers, submodules and hooks among them."""


def noting_changes(model: nn.Module) -> Callable[[], tuple[str, ...]]:
    """A function that names the attributes of the modules of ``model``, buffers aside, that have changed since.

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
    parameters = {name: (parameter, _noted(parameter), storage_of(parameter))
                  for name, parameter in model.named_parameters() if is_plain(parameter)}

    def changed() -> tuple[str, ...]:
        attributes = tuple(
            f"{path}.{name}" if path else name for path, module in modules.items()
            for name, value in vars(module).items()
            if name not in OF_TORCH and not (name in before[path] and _is_same(before[path][name], value))
        )
        written = (name for name, (parameter, value, memory) in parameters.items()
                   if not _is_same(value, parameter) or storage_of(parameter) != memory)
        return (*attributes, *written)

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
