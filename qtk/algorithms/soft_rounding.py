"""Rounding that is learned with what it is part of: AdaRound's variable V, under autograd.

Where the loss is not a quadratic form of one layer's weight, as of a block of layers (BRECQ, Li et al.,
arXiv 2102.05426), the choice stands in the model itself: made, ``round(h(V))``, with the gradient of the relaxed
``h(V)`` of ``qtk.algorithms.adaround`` (straight through, as in arXiv 2309.05516). So the model that is learned is the
model that is left, and no second term must drive choices to 0 or 1, for which hundreds of steps are too few.
"""

from __future__ import annotations

import torch  # noqa: F401  the example uses it
from torch import Tensor

from qtk.algorithms.adaround import GAMMA, ZETA, RoundingChoices
from qtk.algorithms.weight_grid import WeightGrid

EDGE = 0.02
"""How far a choice starts from 0 and 1 at least, where the sigmoid has no gradient."""


class SoftRounding:
    """A weight, each of its elements at one of two grid points, as ``variable`` says.

    It starts half way from the float weight to the grid point in use, to which it is therefore rounded.

    Args:
        weight: float weights.
        grid: the grid points of every weight.
        near: the grid points in use.

    Shape: one for all.

    >>> from qtk.core.dtypes import dtype
    >>> from qtk.core.spec import QuantSpec
    >>> grid = WeightGrid(QuantSpec(dtype("int4"), symmetric=True), torch.ones(2))
    >>> rounding = SoftRounding(torch.tensor([0.3, 1.6]), grid, torch.tensor([0.0, 2.0]))
    >>> rounding.weight().detach()
    tensor([0., 2.])
    """

    def __init__(self, weight: Tensor, grid: WeightGrid, near: Tensor) -> None:
        self._choices = RoundingChoices(weight, grid, near)
        present = near / self._choices.scale - self._choices.lower
        self._choices.fraction.add_(present).mul_(0.5).clamp_(EDGE, 1 - EDGE)
        self.variable = self._choices.initial_variable().requires_grad_()

    def weight(self) -> Tensor:
        """The weight with every choice made; its gradient goes to the relaxed choices."""
        soft = (self.variable.sigmoid() * (ZETA - GAMMA) + GAMMA).clamp(0, 1)
        return self._choices.weight(soft + (soft.round() - soft).detach())
