"""One small model of the zoo: how to build it, and what it eats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Inputs = Tensor | tuple[Any, ...] | Mapping[str, Any]


@dataclass(frozen=True)
class Entry:
    """A model and its inputs, both the same every time for the same arguments.

    ``dynamic``: capture must let the batch vary. ``trains``: its train mode (dropout off) is its graph's.
    """

    name: str
    builder: Callable[[], nn.Module]
    make_inputs: Callable[[int], Inputs]
    dynamic: bool = True
    trains: bool = True

    def model(self) -> nn.Module:
        """A new copy in eval mode, batch norm statistics off their defaults."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.builder().eval()
            for name, buffer in model.named_buffers():
                if name.endswith("running_mean"):
                    buffer.normal_()
                elif name.endswith("running_var"):
                    buffer.uniform_(0.5, 2.0)
        return model

    def inputs(self, batch: int = 2) -> Inputs:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(batch)
            return self.make_inputs(batch)

    def run(self, model: nn.Module, batch: int = 2) -> Any:
        inputs = self.inputs(batch)
        if isinstance(inputs, Tensor):
            return model(inputs)
        return model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)

    def __str__(self) -> str:
        return self.name


def images(channels: int = 3, size: int = 8) -> Callable[[int], Tensor]:
    return lambda batch: torch.randn(batch, channels, size, size)


def vectors(width: int = 8) -> Callable[[int], Tensor]:
    return lambda batch: torch.randn(batch, width)


def sequences(length: int = 5, width: int = 16) -> Callable[[int], Tensor]:
    return lambda batch: torch.randn(batch, length, width)


def tokens(length: int = 6, vocabulary: int = 20) -> Callable[[int], Tensor]:
    return lambda batch: torch.randint(vocabulary, (batch, length))
