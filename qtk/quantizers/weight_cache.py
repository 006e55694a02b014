"""Caches the last fake-quantized weight while weight, scale and zero point do not change."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from qtk.torch_private import is_traced, version_of


class WeightCache:
    """A cache of one result, keyed by memory address and version of the tensors it was computed from.

    A tensor's version counter shows a change, but not a write through ``tensor.data`` or by a fused optimizer
    (``AdamW(fused=True)``). So it caches only while ``enabled``: inside qtk's own functions, where nobody else writes.

    A copy or pickle of a cache is empty and not enabled.
    """

    def __init__(self) -> None:
        self.enabled = False
        self._key: tuple[object, ...] = ()
        self._weight: Tensor | None = None
        self._result: Tensor | None = None

    def clear(self) -> None:
        self._key, self._weight, self._result = (), None, None

    def get(
        self, simulate: Callable[[Tensor], Tensor], weight: Tensor, scale: Tensor, zero_point: Tensor | None
    ) -> Tensor:
        """``simulate(weight)``, from the cache if enabled and weight, scale and zero point equal the last call's."""
        if not self.enabled:
            return simulate(weight)
        sources = (weight, scale) if zero_point is None else (weight, scale, zero_point)
        if not all(_is_plain(source) for source in sources) or is_traced():  # a tracer must see every call
            return simulate(weight)
        key = tuple(_state(source) for source in sources)
        if self._result is None or (*key, version_of(self._result)) != self._key:
            with torch.inference_mode(False), torch.no_grad():
                self._result = simulate(weight)
            # keeps the weight alive, so that no other tensor gets its address
            self._key, self._weight = (*key, version_of(self._result)), weight.detach()
        return self._result

    def __reduce__(self) -> tuple[type[WeightCache], tuple[()]]:
        return WeightCache, ()


def _state(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), version_of(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride()


def _is_plain(tensor: Tensor) -> bool:
    """Says whether the tensor has an address and a version: no fake, functional, inference or other subclass."""
    return type(tensor) in (Tensor, nn.Parameter, nn.Buffer) and not tensor.is_inference()
