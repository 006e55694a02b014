"""Rounding that is learned with what it is part of: AdaRound's variable V, under autograd.

Where the loss is not a quadratic form of one layer's weight, as of a block of layers (BRECQ, Li et al.,
arXiv 2102.05426), the relaxed choice ``h(V)`` of ``qtk.algorithms.adaround`` stands in the model itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qtk.algorithms.adaround import GAMMA, ZETA, Choices, exponent
from qtk.algorithms.weight_grid import WeightGrid

EDGE = 0.02
"""How far a choice starts from 0 and 1 at least, where the sigmoid has no slope."""


class SoftRounding:
    """A weight between two grid points for each of its elements, moved by ``variable``.

    It starts from the float weight, or from the grid point in use where that is not next to it.

    Args:
        weight: float weights.
        grid: the grid points of every weight.
        near: the grid points in use.

    Shape: one for all.

    >>> from qtk.core.dtypes import dtype
    >>> from qtk.core.spec import QuantSpec
    >>> grid = WeightGrid(QuantSpec(dtype("int4"), symmetric=True), torch.ones(2))
    >>> rounding = SoftRounding(torch.tensor([0.3, 1.6]), grid, torch.tensor([0.0, 2.0]))
    >>> rounding.weight().detach(), rounding.rounded()
    (tensor([0.3000, 1.6000]), tensor([0., 2.]))
    """

    def __init__(self, weight: Tensor, grid: WeightGrid, near: Tensor) -> None:
        self._choices = Choices(weight, grid, near)
        self._choices.fraction.clamp_(EDGE, 1 - EDGE)
        self.variable = self._choices.initial_variable().requires_grad_()

    def weight(self) -> Tensor:
        """The relaxed weight."""
        return self._choices.weight(self._soft())

    @torch.no_grad()
    def rounded(self) -> Tensor:
        """The weight with every choice made."""
        return self._choices.weight(self._soft().round())

    def undecided(self, progress: float) -> Tensor:
        """The mean of ``1 - |2 h(V) - 1|^β``, which drives choices to 0 or 1."""
        distance = (2 * self._soft() - 1).abs().clamp(min=1e-6)
        return ((1 - distance.pow(exponent(progress))) * self._choices.is_free).mean()

    def _soft(self) -> Tensor:
        return (self.variable.sigmoid() * (ZETA - GAMMA) + GAMMA).clamp(0, 1)
