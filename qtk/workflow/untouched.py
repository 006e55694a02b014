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
    """Restores attributes, training flags and buffer values of every module of ``model``, and the random state."""
    attributes = {module: dict(module.__dict__) for module in model.modules()}
    tables = {module: {name: dict(module.__dict__[name]) for name in TABLES} for module in attributes}
    values = {buffer: buffer.clone() for buffer in model.buffers() if not is_lazy(buffer)}
    devices = {tensor.device.index for tensor in (*model.parameters(), *values) if tensor.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(devices)):
        try:
            yield
        finally:
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
