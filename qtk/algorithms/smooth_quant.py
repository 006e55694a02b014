"""SmoothQuant: per-channel scales that move the range of an activation into the weights it is multiplied with.

Xiao et al., arXiv 2211.10438. With ``s`` the input becomes ``x / s`` and the input channels of every weight that
multiplies it ``W · s``; the product stays what it was, but outlier channels of ``x`` no longer decide its scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

LARGEST_SCALE = 1e4
"""Scales are clamped to their geometric mean times or by this: nearly dead channels are not blown up to any size."""

GRID = tuple(tenth / 10 for tenth in range(11))
"""The migration strengths tried by the search."""


def smoothing_scale(input_absmax: Tensor, weight_absmax: Tensor, alpha: float) -> Tensor:
    """``s = input_absmax^alpha / weight_absmax^(1 - alpha)`` (equation 4), times what keeps the largest input.

    A common factor of all ``s`` changes no rounding error of the activation itself. This one leaves its range as it is,
    so that a tensor of which it is a part, such as queries, keys and values, is quantized no more coarsely. Channels
    whose input or weights are all 0 get scale 1.

    Shape: ``input_absmax``, ``weight_absmax`` [channels]; result likewise, float64.

    >>> smoothing_scale(torch.tensor([64.0, 1.0, 0.0]), torch.tensor([1.0, 1.0, 1.0]), 0.5)
    tensor([1.0000, 0.1250, 1.0000], dtype=torch.float64)
    """
    inputs, weights = input_absmax.to(torch.float64), weight_absmax.to(torch.float64)
    alive = (inputs > 0) & (weights > 0)
    if not bool(alive.any()):
        return torch.ones_like(inputs)
    logarithm = alpha * inputs.where(alive, 1.0).log() - (1 - alpha) * weights.where(alive, 1.0).log()
    limit = math.log(LARGEST_SCALE)
    scale = (logarithm - logarithm[alive].mean()).clamp(-limit, limit).exp()
    return (scale * (inputs / scale)[alive].max() / inputs[alive].max()).where(alive, 1.0)


def at(scale: Tensor, index: Tensor) -> Tensor:
    """``scale[index]``, with 1 where the index is -1.

    >>> at(torch.tensor([2.0, 3.0]), torch.tensor([1, -1]))
    tensor([3., 1.])
    """
    return torch.cat([scale, scale.new_ones(1)])[index]


def per_channel(scale: Tensor, axis: int, rank: int) -> Tensor:
    """``scale`` [C], shaped to be broadcast against a tensor of ``rank`` with C channels at ``axis``.

    >>> per_channel(torch.ones(3), 1, 4).shape
    torch.Size([1, 3, 1, 1])
    """
    return scale.reshape([-1 if axis % rank == other else 1 for other in range(rank)])


@dataclass(frozen=True, slots=True, eq=False)
class SmoothedProduct:
    """A product of an input and a weight.

    Args:
        weight: the weight, before smoothing.
        channel: int64, broadcastable to ``weight``: the input channel that each element multiplies, -1 for none.
        exact: (input, weight) → output, in float.
        rounded: (input, weight) → output with the weight quantized.
    """

    weight: Tensor
    channel: Tensor
    exact: Callable[[Tensor, Tensor], Tensor]
    rounded: Callable[[Tensor, Tensor], Tensor]


class SmoothedInput:
    """An activation to be smoothed, with samples of it and all products it enters.

    Args:
        samples: values of the activation, on which errors are measured.
        axis: the channels.
        variable: int64 [C], the element of the smoothing scale that divides each channel; -1: none does.
        round_input: (a smoothed sample, the scale [C] that it was divided by) → the sample quantized.
        products: the products with weights.
    """

    def __init__(
        self,
        samples: Sequence[Tensor],
        axis: int,
        variable: Tensor,
        round_input: Callable[[Tensor, Tensor], Tensor],
        products: Sequence[SmoothedProduct],
    ) -> None:
        self.samples = samples
        self.axis = axis
        self.variable = variable
        self.round_input = round_input
        self.products = products

    @cached_property
    def outputs(self) -> list[list[Tensor]]:
        """For every sample, the float outputs of the products."""
        return [[product.exact(x, product.weight) for product in self.products] for x in self.samples]

    @cached_property
    def signal(self) -> list[float]:
        """The squared size of the float outputs of every product, over all samples."""
        return [sum(map(_squared_size, outputs)) for outputs in zip(*self.outputs, strict=True)]

    def channel_scale(self, scale: Tensor) -> Tensor:
        """The scale of every channel. Shape: ``scale`` [variables]; result [C]."""
        return at(scale, self.variable)

    def noise_to_signal(self, scale: Tensor) -> list[float]:
        """Squared error of every product's output relative to its squared size, quantized after smoothing by ``scale``.

        Shape: ``scale`` [variables]; result [products].
        """
        factor = self.channel_scale(scale)
        noise = [0.0] * len(self.products)
        weights = [product.weight * at(factor, product.channel).to(product.weight.dtype) for product in self.products]
        for x, outputs in zip(self.samples, self.outputs, strict=True):
            smoothed = x / per_channel(factor, self.axis, x.ndim).to(x.dtype)
            rounded = self.round_input(smoothed, factor)
            for index, (product, exact) in enumerate(zip(self.products, outputs, strict=True)):
                noise[index] += _squared_size(product.rounded(rounded, weights[index]) - exact)
        return [a / b if b > 0 else 0.0 for a, b in zip(noise, self.signal, strict=True)]


class SmoothedSite:
    """A quantized value that is divided by a smoothing scale, and read by other ops than products with weights.

    Args:
        samples: of the value.
        variable: int64, broadcastable to each sample: the element of the scale that divides it; -1: none does.
        round_value: a smoothed sample → the sample quantized.
    """

    def __init__(self, samples: Sequence[Tensor], variable: Tensor, round_value: Callable[[Tensor], Tensor]) -> None:
        self.samples = samples
        self.variable = variable
        self.round_value = round_value

    def noise_to_signal(self, scale: Tensor) -> list[float]:
        """Squared error of the value relative to its squared size, quantized after smoothing by ``scale``.

        Shape: ``scale`` [variables]; result [1].
        """
        noise = signal = 0.0
        for x in self.samples:
            factor = at(scale, self.variable).to(x.dtype)
            noise += _squared_size(self.round_value(x / factor) * factor - x)
            signal += _squared_size(x)
        return [noise / signal if signal > 0 else 0.0]


def output_error(inputs: Sequence[SmoothedInput | SmoothedSite], scale: Tensor) -> float:
    """Mean of the noise-to-signal ratios of all products and sites after smoothing by ``scale``, each counted once.

    Shape: ``scale`` [variables].
    """
    ratios = [ratio for each in inputs for ratio in each.noise_to_signal(scale)]
    return sum(ratios) / len(ratios)


@dataclass(frozen=True, slots=True, eq=False)
class ScaleChoice:
    """The result of a search: the best scale, its alpha (``None``: no smoothing), the errors without and with it."""

    scale: Tensor
    alpha: float | None
    before: float
    after: float

    @property
    def gain_db(self) -> float:
        """By how much the error falls."""
        if self.after == self.before:
            return 0.0
        return 10 * math.log10(self.before / self.after) if self.after > 0 else math.inf


def search(
    inputs: Sequence[SmoothedInput | SmoothedSite], input_absmax: Tensor, weight_absmax: Tensor,
    alphas: Sequence[float] = GRID,
) -> ScaleChoice:
    """The smoothing scale of one of ``alphas``, or no smoothing, whichever has the smallest output error.

    Shape: ``input_absmax``, ``weight_absmax`` [variables].
    """
    none = torch.ones_like(input_absmax, dtype=torch.float64)
    before = output_error(inputs, none)
    best = ScaleChoice(none, None, before, before)
    for alpha in alphas:
        scale = smoothing_scale(input_absmax, weight_absmax, alpha)
        error = output_error(inputs, scale)
        if error < best.after:
            best = ScaleChoice(scale, alpha, before, error)
    return best


def _squared_size(x: Tensor) -> float:
    """The sum of the squares, in float64."""
    flat = x.double().flatten()
    return float(flat.dot(flat))
