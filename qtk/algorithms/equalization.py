"""Cross-layer equalization: factors that give the weights before and behind a channel the same range.

A factor f of a channel multiplies the rows of the weights that produce it and divides the columns of those that read
it. Between two layers the ranges are equal at f = √(r1 r2) / r1, with r1 the largest magnitude of the producer's row
and r2 that of the consumer's column (Nagel et al., arXiv:1906.04721, eq. 11). With several producers and consumers r1
and r2 are the largest over all of them; chains, depthwise triples and residual regions follow from repeating this
channel by channel until nothing moves, which is Osborne's balancing of a matrix in the maximum norm (Schulman and
Sinclair, arXiv:1504.03026).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BOUND = 2.0**16
"""Largest factor, and 1 over the smallest."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerMagnitudes:
    """The magnitudes of a weight, and the channels that its elements connect.

    Args:
        magnitudes: |weight|, or the largest of the elements that connect the same channels.
        outputs: int64, broadcastable to it: the channel that each element produces, −1 for one without a factor.
        inputs: likewise, the channel that each element reads.
    """

    magnitudes: Tensor
    outputs: Tensor
    inputs: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Equalization:
    """The factors, and the ranges of weights around every channel.

    Args:
        factors: float64 [channels].
        before: [channels] ratio r1 / r2 of the ranges before; 1 for a channel that nothing produces or reads.
        after: the same with the factors.
        num_sweeps: how often every channel was visited.
    """

    factors: Tensor
    before: Tensor
    after: Tensor
    num_sweeps: int


def equalize(
    layers: Sequence[LayerMagnitudes], groups: Sequence[Tensor], *, tolerance: float = 0.0025, max_sweeps: int = 500
) -> Equalization:
    """Factors at which the ranges before and behind every channel are equal.

    Channels that only zeros produce or read keep the factor 1. No factor leaves [1 / ``BOUND``, ``BOUND``].

    >>> first = LayerMagnitudes(torch.tensor([[8.0], [1.0]]), torch.tensor([[0], [1]]), torch.tensor([[-1]]))
    >>> second = LayerMagnitudes(torch.tensor([[2.0, 4.0]]), torch.tensor([[-1]]), torch.tensor([[0, 1]]))
    >>> equalize([first, second], [torch.tensor([0, 1])]).factors
    tensor([0.5000, 2.0000], dtype=torch.float64)

    Args:
        layers: every weight that produces or reads a channel.
        groups: a partition of the channels 0, 1, …; the channels of one group are updated together. Where a weight
            connects channels of one group to each other, as around a residual connection, they go half of the way.
        tolerance: largest |log f| of a last sweep.
        max_sweeps: sweeps after which to stop in any case.
    """
    num_channels = sum(len(group) for group in groups)
    weights = [_Weight(layer) for layer in layers]
    factors = torch.ones(num_channels + 1, dtype=torch.float64)  # the last one is that of channel −1
    writers = [[weight for weight in weights if weight.writes(group)] for group in groups]
    readers = [[weight for weight in weights if weight.reads(group)] for group in groups]
    before = _ratios(weights, factors)
    num_sweeps, largest = 0, math.inf
    while largest > tolerance and num_sweeps < max_sweeps:
        num_sweeps, largest = num_sweeps + 1, 0.0
        for group, writing, reading in zip(groups, writers, readers, strict=True):
            produced = _largest([weight.produced(factors) for weight in writing], factors)[group]
            read = _largest([weight.read(factors) for weight in reading], factors)[group]
            step = torch.where((produced > 0) & (read > 0), (read / produced).sqrt(), 1.0)
            if not set(writing).isdisjoint(reading):
                step = step.sqrt()
            updated = (factors[group] * step).clamp(1 / BOUND, BOUND)
            largest = max(largest, float((updated / factors[group]).log().abs().max()))
            factors[group] = updated
    return Equalization(factors[:-1], before, _ratios(weights, factors), num_sweeps)


def absorbed_bias(mean: Tensor, std: Tensor, smallest: Tensor) -> Tensor:
    """What a ReLU lets pass unchanged nearly always, so that the next layer's bias can take it up.

    c = max(0, mean − 3 std) of the values before the ReLU (arXiv:1906.04721, §4.1.3), and no more than the smallest of
    them that was seen.

    >>> absorbed_bias(torch.tensor([5.0, 5.0, 1.0]), torch.ones(3), torch.tensor([3.0, 1.5, 0.5]))
    tensor([2.0000, 1.5000, 0.0000])

    Shape: all [channels], result the same.
    """
    return torch.minimum(mean - 3 * std, smallest).clamp(min=0)


class _Weight:
    """The magnitudes of a weight, for the factors of the moment."""

    def __init__(self, layer: LayerMagnitudes) -> None:
        self._outputs, self._inputs = layer.outputs, layer.inputs
        same = (self._outputs == self._inputs) & (self._outputs >= 0)  # a factor cancels
        self._magnitudes = torch.where(same, 0.0, layer.magnitudes) if bool(same.any()) else layer.magnitudes
        self._written, self._read = (set(index.flatten().tolist()) - {-1} for index in (self._outputs, self._inputs))

    def writes(self, channels: Tensor) -> bool:
        return not self._written.isdisjoint(channels.tolist())

    def reads(self, channels: Tensor) -> bool:
        return not self._read.isdisjoint(channels.tolist())

    def produced(self, factors: Tensor) -> Tensor:
        """The largest magnitude that produces each channel."""
        return _scattered(self._scaled(factors), self._outputs, factors)

    def read(self, factors: Tensor) -> Tensor:
        """The largest magnitude that reads each channel."""
        return _scattered(self._scaled(factors), self._inputs, factors)

    def _scaled(self, factors: Tensor) -> Tensor:
        factors = factors.to(self._magnitudes)
        return self._magnitudes * factors[self._outputs] / factors[self._inputs]


def _scattered(magnitudes: Tensor, channels: Tensor, like: Tensor) -> Tensor:
    """The largest magnitude for each channel; 0 for channels without one."""
    shared = [axis for axis, length in enumerate(channels.shape) if length == 1 < magnitudes.shape[axis]]
    if shared:
        magnitudes = magnitudes.amax(shared, keepdim=True)
    flat = channels.expand(magnitudes.shape).flatten() % len(like)  # −1 is the last
    result = torch.zeros_like(like)
    return result.scatter_reduce_(0, flat, magnitudes.flatten().to(like.dtype), "amax")


def _largest(ranges: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack(ranges).amax(0) if ranges else torch.zeros_like(like)


def _ratios(weights: Sequence[_Weight], factors: Tensor) -> Tensor:
    produced, read = (
        _largest([getattr(weight, side)(factors) for weight in weights], factors)[:-1] for side in ("produced", "read")
    )
    return torch.where((produced > 0) & (read > 0), produced / read, 1.0)
