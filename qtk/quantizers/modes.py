"""Switches the mode of many quantizers at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

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
