"""Restores the buffers that a model's forward writes: the state of a stream, a cache, a counter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def buffers_kept(model: nn.Module, *, but: tuple[type[nn.Module], ...] = ()) -> Iterator[None]:
    """Restores the buffers of ``model`` on exit, but those that modules of the types ``but`` hold themselves.

    >>> norm = nn.BatchNorm1d(2)
    >>> with buffers_kept(norm):
    ...     _ = norm(torch.randn(4, 2))
    >>> norm.running_mean
    tensor([0., 0.])
    """
    owners = [(path, module) for path, module in model.named_modules() if not isinstance(module, but)]
    held = {
        (f"{path}.{name}" if path else name): buffer
        for path, module in owners for name, buffer in module._buffers.items() if buffer is not None
    }
    before = {name: buffer.detach().clone() for name, buffer in held.items() if buffer.device.type != "meta"}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, value in before.items():
                if held[name].shape == value.shape:
                    held[name].copy_(value)
