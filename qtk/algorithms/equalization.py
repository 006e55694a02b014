"""Cross-layer equalization: factors that give the weights before and behind a channel the same range.

A factor f of a channel multiplies the rows of the weights that produce it and divides the columns of the weights that
read it. Between two layers the ranges are equal at f = √(r1 r2) / r1, with r1 the largest magnitude of the producer's
row and r2 of the consumer's column (Nagel et al., arXiv:1906.04721, eq. 11). With several producers and consumers r1
and r2 are the largest over all of them; chains, depthwise triples and residual regions follow from repeating this
channel by channel until nothing moves, which is Osborne's balancing of a matrix in the maximum norm (Schulman and
Sinclair, arXiv:1504.03026).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

BOUND = 2.0**16
"""Largest factor, and 1 over the smallest."""

SMALLEST_WINDOW, LARGEST_WINDOW = 0.25, 0.8
"""By how much, as a logarithm, an element that a sweep leaves out is smaller than the largest of its channel."""


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
    layers: Sequence[LayerMagnitudes], groups: Sequence[Tensor], *, tolerance: float = 0.01, max_sweeps: int = 2000
) -> Equalization:
    """Factors at which the ranges before and behind every channel are equal.

    Channels that only zeros produce or read keep the factor 1. No factor leaves [1 / ``BOUND``, ``BOUND``].

    Most elements of a weight are never the largest of their row or column. A sweep looks only at elements that may
    become it before the logarithm of a factor has moved by half of a window; then all are looked at again.

    >>> first = LayerMagnitudes(torch.tensor([[8.0], [1.0]]), torch.tensor([[0], [1]]), torch.tensor([[-1]]))
    >>> second = LayerMagnitudes(torch.tensor([[2.0, 4.0]]), torch.tensor([[-1]]), torch.tensor([[0, 1]]))
    >>> equalize([first, second], [torch.tensor([0, 1])]).factors
    tensor([0.5000, 2.0000], dtype=torch.float64)

    Args:
        layers: every weight that produces or reads a channel.
        groups: a partition of the channels 0, 1, …; the channels of one group are updated together. Where a weight
            connects channels of one group to each other, as around a residual connection, they go half of the way.
        tolerance: largest |log(r1 / r2)| of a channel at the end.
        max_sweeps: sweeps over the groups after which to stop in any case.
    """
    num_channels = sum(map(len, groups))
    weights = [_LogWeight.of(layer) for layer in layers]
    log_factors = torch.zeros(num_channels + 1, dtype=torch.float64)  # the last belongs to channel −1, always 0
    ranges = before = _log_ranges(weights, log_factors)
    near, near_at = weights, log_factors.clone()
    num_sweeps, moved, enough = 0, math.inf, tolerance / 2
    while num_sweeps < max_sweeps and _worst(ranges) > tolerance and moved > tolerance / 32:
        is_new = near is weights
        if is_new:
            near, near_at = [_near_largest(weights, log_factors, ranges, LARGEST_WINDOW)], log_factors.clone()
        window = min(max(16 * moved, SMALLEST_WINDOW), LARGEST_WINDOW)
        is_same = is_new and window == LARGEST_WINDOW
        sweep = _Sweep(near[0] if is_same else _near_largest(near, log_factors, ranges, window), groups)
        start, moved, drift = log_factors.clone(), math.inf, 0.0
        while num_sweeps < max_sweeps and moved > enough and drift <= window / 2:
            num_sweeps += 1
            moved = sweep.run(log_factors)
            drift = float((log_factors - start).abs().max())
        enough = enough if moved > enough else moved / 2
        if float((log_factors - near_at).abs().max()) > LARGEST_WINDOW / 2:
            near = weights
        ranges = _log_ranges(near, log_factors)
    ranges = _log_ranges(weights, log_factors)
    return Equalization(log_factors[:-1].exp(), _ratio(before), _ratio(ranges), num_sweeps)


def absorbed_bias(mean: Tensor, std: Tensor, smallest: Tensor) -> Tensor:
    """Returns what a ReLU lets pass unchanged nearly always, so that the next layer's bias can take it up.

    c = max(0, mean − 3 std) of the values before the ReLU (arXiv:1906.04721, §4.1.3), and no more than the smallest of
    them that was seen.

    >>> absorbed_bias(torch.tensor([5.0, 5.0, 1.0]), torch.ones(3), torch.tensor([3.0, 1.5, 0.5]))
    tensor([2.0000, 1.5000, 0.0000])

    Shape: all [channels], result the same.
    """
    return torch.minimum(mean - 3 * std, smallest).clamp(min=0)


@dataclass(frozen=True, slots=True, eq=False)
class _LogWeight:
    """The logarithms of the magnitudes of a weight, or of some elements of several, and the channels they connect."""

    logs: Tensor
    outputs: Tensor
    inputs: Tensor

    @staticmethod
    def of(layer: LayerMagnitudes) -> _LogWeight:
        """Of a whole weight, without the elements in which a factor cancels."""
        logs, same = layer.magnitudes.log(), (layer.outputs == layer.inputs) & (layer.outputs >= 0)
        return _LogWeight(torch.where(same, -math.inf, logs) if bool(same.any()) else logs, layer.outputs, layer.inputs)

    def scaled(self, log_factors: Tensor) -> Tensor:
        """The logarithms of the scaled magnitudes."""
        log_factors = log_factors.to(self.logs)
        return self.logs + log_factors[self.outputs] - log_factors[self.inputs]


def _near_largest(
    weights: Sequence[_LogWeight], log_factors: Tensor, ranges: tuple[Tensor, Tensor], window: float
) -> _LogWeight:
    """The elements within a factor of exp(``window``) of the largest that produces, or that reads, a channel."""
    least = [side - window for side in ranges]
    for side in least:
        side[side == -math.inf] = math.inf
        side[-1] = math.inf
    logs, outputs, inputs = [], [], []
    for weight in weights:
        scaled = weight.scaled(log_factors)
        produced, read = (side.to(scaled) for side in least)
        kept = (scaled >= torch.minimum(produced[weight.outputs], read[weight.inputs])).nonzero(as_tuple=True)
        logs.append(weight.logs[kept].to(log_factors))
        outputs.append(weight.outputs.expand(scaled.shape)[kept])
        inputs.append(weight.inputs.expand(scaled.shape)[kept])
    return _LogWeight(torch.cat(logs), torch.cat(outputs), torch.cat(inputs))


def _log_ranges(weights: Sequence[_LogWeight], log_factors: Tensor) -> tuple[Tensor, Tensor]:
    """The logarithms of the largest magnitudes that produce and that read each channel, −∞ where there is none."""
    ranges = (torch.full_like(log_factors, -math.inf), torch.full_like(log_factors, -math.inf))
    for weight in weights:
        scaled = weight.scaled(log_factors)
        for channels, largest in zip((weight.outputs, weight.inputs), ranges, strict=True):
            shared = [axis for axis, length in enumerate(channels.shape) if length == 1 < scaled.shape[axis]]
            found = scaled.amax(shared, keepdim=True) if shared else scaled
            flat = channels.expand(found.shape).flatten() % len(log_factors)
            largest.scatter_reduce_(0, flat, found.flatten().to(largest), "amax")
    return ranges


def _worst(ranges: tuple[Tensor, Tensor]) -> float:
    """The largest |log(r1 / r2)|."""
    ratios = _ratio(ranges).log().abs()
    return float(ratios.max()) if len(ratios) else 0.0


def _ratio(ranges: tuple[Tensor, Tensor]) -> Tensor:
    produced, read = (side[:-1] for side in ranges)
    return torch.where(produced.isfinite() & read.isfinite(), (produced - read).exp(), 1.0)


class _Sweep:
    """Equalizes the ranges around the channels of one group after the other, all other factors as they are."""

    def __init__(self, elements: _LogWeight, groups: Sequence[Tensor]) -> None:
        self._groups = groups
        num_channels = sum(map(len, groups))
        owner, place = torch.full((num_channels + 1,), -1), torch.zeros(num_channels + 1, dtype=torch.int64)
        for index, group in enumerate(groups):
            owner[group], place[group] = index, torch.arange(len(group))
        self._writing, self._reading = (
            _by_group(elements, here, there, owner, place, len(groups))
            for here, there in ((elements.outputs, elements.inputs), (elements.inputs, elements.outputs))
        )
        inside = owner[elements.outputs]
        inside = inside[(inside == owner[elements.inputs]) & (inside >= 0)]
        self._exponents = [0.5] * len(groups)
        for index in inside.unique().tolist():  # type: ignore[no-untyped-call]
            self._exponents[index] = 0.25

    def run(self, log_factors: Tensor) -> float:
        """Changes ``log_factors``. Returns: the largest change."""
        moved = 0.0
        bound = math.log(BOUND)
        for index, group in enumerate(self._groups):
            old = log_factors[group]
            produced = old + _largest(self._writing[index], -log_factors, len(group))
            read = _largest(self._reading[index], log_factors, len(group)) - old
            step = torch.where(produced.isfinite() & read.isfinite(), (read - produced) * self._exponents[index], 0.0)
            log_factors[group] = (old + step).clamp(-bound, bound)
            moved = max(moved, float((log_factors[group] - old).abs().max()))
        return moved


_Side: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Logarithms of elements, the place of the channel at one end in its group, and the channel at the other end."""


def _by_group(
    elements: _LogWeight, here: Tensor, there: Tensor, owner: Tensor, place: Tensor, num_groups: int
) -> list[_Side]:
    owners = owner[here]
    order = owners.argsort()
    lengths = torch.bincount(owners + 1, minlength=num_groups + 1).tolist()
    parts = [torch.split(side[order], lengths) for side in (elements.logs, place[here], there)]
    return list(zip(*(part[1:] for part in parts), strict=True))


def _largest(side: _Side, log_factors: Tensor, length: int) -> Tensor:
    logs, place, other = side
    largest = torch.full((length,), -math.inf, dtype=log_factors.dtype)
    return largest.scatter_reduce_(0, place, logs + log_factors[other], "amax")
