"""The errors that block reconstruction learns and is judged by."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from qtk.numerics import token_scores
from qtk.observers.extremes import sentinel_bound

TINY = 1e-30


@dataclass(slots=True)
class BlockErrors:
    """Errors over samples: squared error of what leaves blocks and its power, and divergences of the model's output.

    Args:
        noise: the squared errors.
        signal: the power.
        divergences: of the rows of the output.

    Shape: ``noise`` []; ``divergences`` [rows].
    """

    noise: Tensor = field(default_factory=lambda: torch.zeros(()))
    signal: float = 0.0
    divergences: Tensor = field(default_factory=lambda: torch.zeros(0))

    def add(self, other: BlockErrors) -> None:
        """Changes the errors: adds the errors over other samples."""
        self.noise = self.noise + other.noise
        self.divergences = torch.cat([self.divergences.to(other.divergences.device), other.divergences])
        self.signal += other.signal

    def add_value(self, value: Tensor, wanted: Tensor, weight: float) -> None:
        """Changes the sums: adds a value that leaves a block, its squares multiplied by ``weight``."""
        self.noise = self.noise + _squared_error(value, wanted) * weight
        self.signal += float(power(wanted)) * weight

    def loss(self, weight: float) -> Tensor:
        """The relative error, and ``weight`` times the mean divergence of a row of the output."""
        loss = self.noise / max(self.signal, TINY)
        return loss + weight * self.divergences.sum() / max(len(self.divergences), 1) if weight else loss

    def diverges_more(self, before: BlockErrors) -> bool:
        """Says whether the outputs of the same samples diverge more than ``before``, by more than chance explains.

        The mean of the rises of the rows is compared with its standard error: of a few rows one or two make up most of
        the divergence. Where values decide how many rows there are, and these differ, the means are compared.

        >>> before, after = (BlockErrors(divergences=torch.tensor(each)) for each in ([0.1, 0.2, 0.1], [0.1, 0.2, 0.9]))
        >>> after.diverges_more(before), BlockErrors(divergences=before.divergences + 0.1).diverges_more(before)
        (False, True)
        """
        if len(self.divergences) != len(before.divergences):
            means = [float(each.divergences.sum()) / max(len(each.divergences), 1) for each in (self, before)]
            return means[0] > means[1]
        rises = (self.divergences - before.divergences).double()
        spread = float(rises.std()) if len(rises) > 1 else 0.0
        return bool(len(rises)) and float(rises.mean()) > spread / len(rises)**0.5


Parts: TypeAlias = tuple[BlockErrors, BlockErrors]
"""Over the samples that are seen, and over the samples that are held out."""


def power(value: Tensor) -> Tensor:
    """The sum of the squares, without attention-mask sentinels. Shape: result []."""
    return value.float().masked_fill(value <= sentinel_bound(value.dtype), 0.0).square().sum()


def _squared_error(value: Tensor, wanted: Tensor) -> Tensor:
    return _without_sentinels(value, wanted).square().sum()


def _without_sentinels(value: Tensor, wanted: Tensor) -> Tensor:
    """The error of a value, 0 where an attention-mask sentinel is wanted."""
    is_sentinel = wanted <= sentinel_bound(wanted.dtype)
    value, wanted = (each.float().masked_fill(is_sentinel, 0.0) for each in (value, wanted))
    return value - wanted


def divergences(output: Tensor, wanted: Tensor) -> Tensor:
    """Returns the Kullback-Leibler divergence of every row of scores.

    Of outputs without an axis of classes the squared error of every sample, relative to the mean power.

    Shape: result [rows].

    >>> divergences(torch.tensor([[1.0, 0.0]] * 3), torch.tensor([[2.0, 0.0]] * 3))
    tensor([0.0671, 0.0671, 0.0671])
    """
    if not output.numel():
        return output.new_zeros(0)
    if output.ndim < 2 or output.shape[-1] < 2:
        noise = _without_sentinels(output, wanted).square().reshape(len(output) if output.ndim else 1, -1).sum(-1)
        return len(noise) * noise / power(wanted).clamp(min=TINY)
    return token_scores.divergences(*(each.reshape(-1, output.shape[-1]) for each in (wanted, output)))
