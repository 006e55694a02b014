"""Restores buffers that a model's forward writes: the state of a stream, a cache, a counter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from qtk.torch_private import base_of

BufferPlace = tuple[nn.Module, str]
"""A module, and the name of a buffer in it."""


class BufferValues:
    """The values that buffers have now, which ``restore`` gives them again.

    >>> norm = nn.BatchNorm1d(2)
    >>> before = BufferValues(buffer_places(norm))
    >>> _ = norm(torch.randn(4, 2))
    >>> before.restore()
    >>> norm.running_mean
    tensor([0., 0.])

    Args:
        places: where they are; meta tensors and ``None`` are left out.
    """

    def __init__(self, places: Iterable[BufferPlace]) -> None:
        self._held: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        for module, name in places:
            buffer = module._buffers[name]
            if buffer is not None and buffer.device.type != "meta":
                self._held.append((module, name, buffer, buffer.detach().clone()))

    @torch.no_grad()
    def restore(self) -> None:
        """Gives the buffers their values again, also where another tensor was assigned."""
        for module, name, buffer, value in self._held:
            buffer = _without_history(buffer)
            if buffer.shape == value.shape:
                buffer.copy_(value)
            module._buffers[name] = buffer


def buffer_places(model: nn.Module) -> list[BufferPlace]:
    """Where the buffers of ``model`` are."""
    return [(module, name) for module in model.modules() for name in module._buffers]


def detach_buffers(places: Iterable[BufferPlace]) -> None:
    """Cuts buffers off from what they were computed from, which a backward pass would go on through."""
    for module, name in places:
        if (buffer := module._buffers.get(name)) is not None and buffer.requires_grad:
            module._buffers[name] = _without_history(buffer)


def _without_history(buffer: Tensor) -> Tensor:
    """Detaches a tensor in place, or, as autograd wants it of a view, returns another with its memory."""
    return buffer.detach_() if base_of(buffer) is None else buffer.detach()


@contextmanager
def buffers_kept(places: Iterable[BufferPlace]) -> Iterator[None]:
    """Restores buffers on exit."""
    before = BufferValues(places)
    try:
        yield
    finally:
        before.restore()
