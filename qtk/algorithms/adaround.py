"""AdaRound (Nagel et al., arXiv 2004.10568): every weight goes up or down, as is best for its layer's output.

The choice is relaxed to a number in [0, 1], a rectified sigmoid of a free variable (equations 21 to 24), and found by
gradient descent; a second term drives it to 0 or 1. The error of the output is the quadratic form of
``qtk.algorithms.output_error``, so that a step takes all samples into account and none is stored. In the end single
choices are turned around as long as that lowers the error (not in the paper).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from qtk.algorithms.grid import Grid
from qtk.algorithms.output_error import ActivationError, OutputError
from qtk.core.dtypes import FloatDtype
from qtk.errors import CalibrationError

ZETA, GAMMA = 1.1, -0.1
"""Ends of the stretched sigmoid, which reaches 0 and 1 before its variable is infinite."""
BETA = 20.0, 2.0
"""First and last exponent of the term that drives choices to 0 or 1."""
DECAYS = 0.9, 0.999
"""Of Adam's averages (Kingma and Ba, arXiv 1412.6980)."""


@dataclass(frozen=True, slots=True)
class Adaround:
    """How the choices are found.

    Args:
        iterations: steps of Adam.
        learning_rate: of Adam.
        regularization: weight of the term that drives choices to 0 or 1; the error is counted in units of what
            rounding one weight to its nearest costs.
        warm_start: part of the iterations without that term.
    """

    iterations: int = 1000
    learning_rate: float = 0.05
    regularization: float = 5.0
    warm_start: float = 0.2

    def __post_init__(self) -> None:
        if self.iterations < 1 or not self.learning_rate > 0 or not 0 <= self.warm_start < 1:
            raise CalibrationError(f"AdaRound needs iterations ≥ 1, learning_rate > 0, 0 ≤ warm_start < 1; got {self}")

    def rounded(self, weight: Tensor, grid: Grid, error: OutputError, behind: ActivationError | None = None) -> Tensor:
        """The weights, each on its grid; no output's error is above that of the nearest.

        Args:
            weight: float weights.
            grid: what they can become.
            error: of the output.
            behind: of what the function that follows makes of it, to judge by that instead.

        Shape: ``weight`` [groups, 1, outputs, columns], in the dtype to compute in; ``grid`` and result alike.

        Raises: CalibrationError for small floats, whose numbers are not evenly spaced.
        """
        if isinstance(grid.spec.dtype, FloatDtype):
            raise CalibrationError(f"AdaRound needs codes that are integers, not {grid.spec.dtype}")
        if error.gram.shape[1] > 1:
            raise CalibrationError("AdaRound needs the Gram matrix of all columns, not of blocks")
        choices = _Choices(weight, grid)
        nearest = grid.nearest(weight)
        judge, unit = behind or error, _unit(weight - nearest, error if behind is None else behind)
        found = choices.weight(self._relaxed(weight, choices, judge, unit).round())
        if behind is not None:
            better = behind.of(weight - found) <= behind.of(weight - nearest)
            return torch.where(better[..., None], found, nearest)
        found, nearest = (_descended(weight, start, choices, error) for start in (found, nearest))
        better = error.of(weight - found) <= error.of(weight - nearest)
        return torch.where(better[..., None], found, nearest)

    def _relaxed(
        self, weight: Tensor, choices: _Choices, error: OutputError | ActivationError, unit: Tensor
    ) -> Tensor:
        """Soft choices, close to 0 or 1."""
        variable = choices.start()
        first, second = torch.zeros_like(variable), torch.zeros_like(variable)
        for step in range(1, self.iterations + 1):
            soft, slope = _rectified_sigmoid(variable)
            gradient = error.slope(weight - choices.weight(soft)) * choices.step * (-2 / unit)
            progress = (step / self.iterations - self.warm_start) / (1 - self.warm_start)
            if progress > 0:
                gradient += self.regularization * _pull(soft, progress)
            gradient *= slope * choices.free
            first.lerp_(gradient, 1 - DECAYS[0])
            second.lerp_(gradient.square(), 1 - DECAYS[1])
            rate = self.learning_rate * math.sqrt(1 - DECAYS[1] ** step) / (1 - DECAYS[0] ** step)
            variable -= rate * first / (second.sqrt() + 1e-12)
        return _rectified_sigmoid(variable)[0]


class _Choices:
    """The two numbers next to each weight."""

    def __init__(self, weight: Tensor, grid: Grid) -> None:
        self.step = grid.scale.to(weight.dtype)
        zero = torch.zeros_like(self.step) if grid.zero_point is None else grid.zero_point.to(weight.dtype)
        exact = weight / self.step
        floor = exact.floor()
        low, high = grid.spec.qmin - zero, grid.spec.qmax - zero
        self.below = floor.clamp(low, high)
        self.above = (floor + 1).clamp(low, high)
        self.free = (self.above > self.below).to(weight.dtype)
        self.part = (exact - floor).clamp(1e-4, 1 - 1e-4)

    def start(self) -> Tensor:
        """The variable at which the soft weights are the weights."""
        return -((ZETA - GAMMA) / (self.part - GAMMA) - 1).log()

    def weight(self, choice: Tensor) -> Tensor:
        return (self.below + choice * self.free) * self.step


def _rectified_sigmoid(variable: Tensor) -> tuple[Tensor, Tensor]:
    """The choice, and its derivative."""
    sigmoid = variable.sigmoid()
    stretched = sigmoid * (ZETA - GAMMA) + GAMMA
    inside = (stretched > 0) & (stretched < 1)
    return stretched.clamp(0, 1), (ZETA - GAMMA) * sigmoid * (1 - sigmoid) * inside


def _pull(soft: Tensor, progress: float) -> Tensor:
    """Derivative of ``1 - |2 soft - 1|^beta``, with beta on its way along a cosine."""
    beta = BETA[1] + 0.5 * (BETA[0] - BETA[1]) * (1 + math.cos(math.pi * progress))
    away = 2 * soft - 1
    return -2 * beta * away.abs().pow(beta - 1) * away.sign()


def _unit(change: Tensor, error: OutputError | ActivationError) -> Tensor:
    """What the changes of an output's weights cost, a weight: dᵀ H d / columns. Shape: [..., outputs, 1]."""
    alone = OutputError(error.gram) if isinstance(error, OutputError) else error
    quadratic = alone.of(change)[..., None] / change.shape[-1]
    return quadratic.clamp(min=torch.finfo(change.dtype).tiny ** 0.5)


def _descended(weight: Tensor, rounded: Tensor, choices: _Choices, error: OutputError) -> Tensor:
    """Turns around, in each output, the choice that lowers its error most, until none does.

    Turning one weight changes d there by δ, and the error by ``2 δ (linear + H d) + δ² H_ii``.
    """
    low, high = choices.weight(torch.zeros_like(weight)), choices.weight(torch.ones_like(weight))
    up = (rounded - low) > (high - rounded)
    slope = error.slope(weight - torch.where(up, high, low))
    diagonal = error.gram.diagonal(dim1=-2, dim2=-1)[:, :, None]
    least = -1e-6 * _unit(weight - rounded, error)  # float noise is no gain
    groups = torch.arange(len(weight), device=weight.device)[:, None]
    for _ in range(weight.shape[-1]):
        delta = torch.where(up, high - low, low - high)
        gain = (2 * slope + delta * diagonal) * delta
        best = gain.min(-1, keepdim=True)
        turn = best.values < least
        if not bool(turn.any()):
            break
        moved = delta.gather(-1, best.indices) * turn
        slope += moved * error.gram[groups, 0, best.indices[:, 0, :, 0]][:, None]
        up.scatter_(-1, best.indices, up.gather(-1, best.indices) ^ turn)
    return torch.where(up, high, low)
