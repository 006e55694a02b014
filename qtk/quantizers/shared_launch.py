"""Weights that are fake-quantized in one launch when a model is called, each fetched by its quantizer.

What a launch computes replaces the arithmetic of a quantizer's call and nothing else. The quantizer is called where it
always was, and what autograd sees is the same: each weight has a gradient function of its own, which saves what it
would save. So one that is not computed, or not fetched, makes no difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from qtk.core.dtypes import FloatDtype
from qtk.core.spec import QuantSpec
from qtk.ops.fake_quantize import with_value
from qtk.ops.fake_quantize_many import fake_quantize_many
from qtk.ops.simulate import simulate
from qtk.quantizers.weight_cache import WeightCache
from qtk.torch_private import is_traced, version_of

LARGEST = 1 << 20
"""Most elements of a weight that shares a launch: the work on a larger one takes long beside its launch, and what all
have that share one is alive at once.
"""

PLAIN = Tensor, nn.Parameter, nn.Buffer
"""Tensors with an address and a version; subclasses of others may have none."""

State: TypeAlias = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """A weight that is to be quantized, by a range that is fixed."""

    weight: Tensor
    spec: QuantSpec
    scale: Tensor
    zero_point: Tensor | None

    @property
    def is_simple(self) -> bool:
        """Whether a launch can serve it, and nothing but a write to a tensor can change its result."""
        return (
            all(type(each) in PLAIN and not each.is_inference() for each in self.tensors) and self.weight.is_leaf
            and 0 < self.weight.numel() <= LARGEST and not self.scale.requires_grad
            and not isinstance(self.spec.dtype, FloatDtype)
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.weight, self.scale) if self.zero_point is None else (self.weight, self.scale, self.zero_point)

    @property
    def state(self) -> State:
        """Changes when a tensor is replaced, moved or written."""
        return tuple((id(each), each.data_ptr(), version_of(each)) for each in self.tensors)


@dataclass(frozen=True, slots=True)
class _Computed:
    request: Request
    state: State
    value: Tensor


_COMPUTED: ContextVar[dict[int, _Computed] | None] = ContextVar("_COMPUTED", default=None)
"""Of the call of a model that this thread is in: ``id`` of a quantizer's scale → what a launch has computed for it."""


@contextmanager
def computed(requests: Iterable[Request]) -> Iterator[None]:
    """Quantizes the weights that can share a launch; while the body runs, their quantizers fetch the results.

    A result is freed with the call that has fetched it.
    """
    devices: dict[torch.device, dict[int, Request]] = {}
    if not is_traced():
        for request in requests:
            if request.is_simple:
                devices.setdefault(request.weight.device, {})[id(request.scale)] = request
    results: dict[int, _Computed] = {}
    for wanted in devices.values():
        if len(wanted) > 1:
            values = _values(list(wanted.values()))
            results |= {key: _Computed(request, request.state, value)
                        for (key, request), value in zip(wanted.items(), values, strict=True)}
            del values
    token = _COMPUTED.set(results)
    try:
        yield
    finally:
        results.clear()
        _COMPUTED.reset(token)


def _values(requests: list[Request]) -> list[Tensor]:
    with torch.no_grad():
        return fake_quantize_many(
            [request.weight for request in requests], [request.scale for request in requests],
            [request.zero_point for request in requests],
            [request.spec.granularity.block_size(request.weight.ndim) for request in requests],
            [int(request.spec.qmin) for request in requests], [int(request.spec.qmax) for request in requests],
        )


def simulated_weight(
    weight: Tensor, spec: QuantSpec, scale: Tensor, zero_point: Tensor | None, cache: WeightCache
) -> Tensor:
    """``simulate(weight, spec, scale, zero_point)``, from the cache, a launch that was shared, or one of its own."""
    if cache.enabled and not torch.is_grad_enabled():
        return cache.get(lambda weight: simulate(weight, spec, scale, zero_point), weight, scale, zero_point)
    results = _COMPUTED.get()
    found = results.pop(id(scale), None) if results else None
    if found is None or is_traced() or Request(weight, spec, scale, zero_point).state != found.state:
        return simulate(weight, spec, scale, zero_point)
    block_size = spec.granularity.block_size(weight.ndim)
    return with_value(found.value, weight, scale, zero_point, block_size, int(spec.qmin), int(spec.qmax))
