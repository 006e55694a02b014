"""The errors that block reconstruction learns and is judged by."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from qtk.algorithms.distillation import distillation_loss
from qtk.observers.extremes import sentinel_bound

TINY = 1e-30


@dataclass(slots=True)
class BlockErrors:
    """Sums over samples: squared error of what leaves blocks and its power, and the divergence of the model's output.

    Args:
        noise: the squared errors.
        signal: the power.
        divergence: of the rows of the output.
        rows: how many these are.

    Shape: ``noise`` and ``divergence`` [].
    """

    noise: Tensor = field(default_factory=lambda: torch.zeros(()))
    signal: float = 0.0
    divergence: Tensor = field(default_factory=lambda: torch.zeros(()))
    rows: int = 0

    def add(self, other: BlockErrors) -> None:
        """Changes the sums: adds the sums over other samples."""
        self.noise, self.divergence = self.noise + other.noise, self.divergence + other.divergence
        self.signal += other.signal
        self.rows += other.rows

    def add_value(self, value: Tensor, wanted: Tensor, weight: float) -> None:
        """Changes the sums: adds a value that leaves a block, its squares multiplied by ``weight``."""
        self.add(BlockErrors(_squared_error(value, wanted) * weight, float(power(wanted)) * weight))

    def loss(self, weight: float) -> Tensor:
        """The relative error, and ``weight`` times the mean divergence of a row of the output."""
        loss = self.noise / max(self.signal, TINY)
        return loss + weight * self.divergence / max(self.rows, 1) if weight else loss


Parts: TypeAlias = tuple[BlockErrors, BlockErrors]
"""Over the samples that are seen, and over the samples that are held out."""


def power(value: Tensor) -> Tensor:
    """The sum of the squares, without attention-mask sentinels. Shape: result []."""
    return value.float().masked_fill(value <= sentinel_bound(value.dtype), 0.0).square().sum()


def _squared_error(value: Tensor, wanted: Tensor) -> Tensor:
    is_sentinel = wanted <= sentinel_bound(wanted.dtype)
    value, wanted = (each.float().masked_fill(is_sentinel, 0.0) for each in (value, wanted))
    return (value - wanted).square().sum()


def divergence(output: Tensor, wanted: Tensor) -> tuple[Tensor, int]:
    """The Kullback-Leibler divergence of scores, summed over their rows, and the number of rows.

    Of outputs without an axis of classes the squared error, relative to their power.

    >>> divergence(torch.tensor([[1.0, 0.0]] * 3), torch.tensor([[2.0, 0.0]] * 3))
    (tensor(0.2014), 3)
    """
    if not output.numel():
        return output.new_zeros(()), 0
    if output.ndim < 2 or output.shape[-1] < 2:
        return len(output) * _squared_error(output, wanted) / power(wanted).clamp(min=TINY), len(output)
    rows = output.numel() // output.shape[-1]
    return distillation_loss(output, wanted) * rows, rows
