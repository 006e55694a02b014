"""A model that is run, switched and traced, and afterwards is as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parameter import is_lazy

TABLES = ("_parameters", "_buffers", "_modules")


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Restores attributes, training flags and buffer values of every module of ``model``, and the random state.

    Lists and dicts that are attributes get their items back.
    """
    scripted = {module: module.training for module in model.modules() if isinstance(module, torch.jit.ScriptModule)}
    attributes = {module: dict(module.__dict__) for module in model.modules() if module not in scripted}
    tables = {module: {name: dict(module.__dict__[name]) for name in TABLES} for module in attributes}
    held = [value for own in attributes.values() for name, value in own.items() if name not in TABLES]
    lists = [(value, list(value)) for value in held if type(value) is list]
    dicts = [(value, dict(value)) for value in held if type(value) is dict]
    values = {buffer: buffer.clone() for buffer in model.buffers() if not is_lazy(buffer)}
    devices = {tensor.device.index for tensor in (*model.parameters(), *values) if tensor.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(devices)):
        try:
            yield
        finally:
            for script, training in scripted.items():
                script.train(training)
            for some_list, items in lists:
                some_list[:] = items
            for some_dict, entries in dicts:
                some_dict.clear()
                some_dict.update(entries)
            for module, before in attributes.items():
                module.__dict__.clear()
                module.__dict__.update(before)
                for name, table in tables[module].items():
                    getattr(module, name).clear()
                    getattr(module, name).update(table)
            with torch.no_grad():
                for buffer, value in values.items():
                    if buffer.shape == value.shape:
                        buffer.copy_(value)
