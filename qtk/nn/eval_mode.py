"""Eval mode as a context that restores the training flags."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode inside, each module's own training flag restored afterwards.

    Sets the flags directly: ``train()`` and ``eval()`` would also drop cached quantized weights.
    """
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
