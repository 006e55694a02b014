"""Many quantizers at once: switches their mode and their caches of weights, and reads their encodings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from qtk.core.encoding import HOST, Encoding, moved
from qtk.errors import EncodingError
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


@torch.no_grad()
def read_encodings(quantizers: Sequence[Quantizer]) -> list[Encoding | EncodingError | None]:
    """The encodings of ``quantizers`` on the CPU, of meta quantizers on meta; errors in place of invalid ones.

    >>> from qtk.core.dtypes import dtype
    >>> from qtk.core.spec import QuantSpec
    >>> read_encodings([Quantizer(QuantSpec(dtype("int8"), symmetric=True), site="fc.weight")])
    [None]
    """
    ranges = [quantizer.range() for quantizer in quantizers]
    given = [tensor for each in ranges for tensor in each if tensor is not None and not tensor.is_meta]
    read = dict(zip(map(id, given), moved(given, HOST), strict=True))
    results: list[Encoding | EncodingError | None] = []
    for quantizer, (scale, zero_point) in zip(quantizers, ranges, strict=True):
        try:
            results.append(quantizer.encoding_of(*(read.get(id(each), each) for each in (scale, zero_point))))
        except EncodingError as error:
            results.append(error)
    return results
