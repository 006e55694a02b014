"""Switches many quantizers at once: their mode, and whether they cache fake-quantized weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from qtk.quantizers.quantizer import Mode, Quantizer


@contextmanager
def in_mode(quantizers: Iterable[Quantizer], mode: Mode) -> Iterator[None]:
    """Runs the body with every quantizer in ``mode``; each returns to its own mode afterwards.

    >>> with in_mode(sim.quantizers.values(), Mode.BYPASS):  # doctest: +SKIP
    ...     float_output = sim.model(x)
    """
    before = [(quantizer, quantizer.mode) for quantizer in quantizers]
    try:
        for quantizer, _ in before:
            quantizer.mode = mode
        yield
    finally:
        for quantizer, previous in before:
            quantizer.mode = previous


@contextmanager
def caching(model: nn.Module) -> Iterator[None]:
    """Quantizes every weight once while the body runs without gradients, as long as nobody writes to it.

    For qtk's own functions: a write through ``tensor.data`` in the body would go unnoticed.
    """
    quantizers = [module for module in model.modules() if isinstance(module, Quantizer) and module.cache]
    caches = [quantizer.weight_cache for quantizer in quantizers if not quantizer.weight_cache.enabled]
    for cache in caches:
        cache.enabled = True
    try:
        yield
    finally:
        for cache in caches:
            cache.enabled = False
            cache.clear()
