"""AdaRound: learns for every weight whether it is rounded up or down, so that the layer's output changes least.

Nagel et al., arXiv 2004.10568. The choice of each weight is relaxed to ``h(V) ∈ [0, 1]``, a rectified sigmoid of a free
variable V (equation 23), and V is found by gradient descent on

    |output error|² + λ · Σ 1 - |2 h(V) - 1|^β                                                 (equations 21 and 24)

whose second term drives h(V) to 0 or 1 as β falls. The output error is the quadratic form of
``qtk.algorithms.output_error``, so that every step takes all samples into account and none is stored. At the end,
coordinate descent moves single weights, also further than up or down (not in the paper).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from qtk.algorithms.coordinate_descent import coordinate_descent
from qtk.algorithms.output_error import ActivationError, OutputError
from qtk.algorithms.weight_grid import WeightGrid
from qtk.core.dtypes import FloatDtype
from qtk.errors import CalibrationError

ZETA, GAMMA = 1.1, -0.1
"""Bounds of the stretched sigmoid, which reaches 0 and 1 before its variable is infinite."""
BETA = 20.0, 2.0
"""First and last exponent β of the term that drives choices to 0 or 1."""
ADAM_DECAYS = 0.9, 0.999
"""Decay rates of Adam's averages (Kingma and Ba, arXiv 1412.6980)."""


@dataclass(frozen=True, slots=True)
class RoundingDescent:
    """The gradient descent on the relaxed choices.

    Args:
        iterations: steps of Adam.
        learning_rate: of Adam.
        regularization: λ; the output error is counted in units of what rounding one weight to nearest costs.
        warm_start: fraction of the iterations without regularization.
    """

    iterations: int = 100
    learning_rate: float = 0.05
    regularization: float = 5.0
    warm_start: float = 0.2


def adaround(
    weight: Tensor, grid: WeightGrid, error: OutputError, activation_error: ActivationError | None = None,
    descent: RoundingDescent = RoundingDescent(),
) -> Tensor:
    """Rounds each weight to its grid; no output's error is above the error of rounding to nearest.

    Args:
        weight: float weights.
        grid: the grid points of every weight.
        error: of the layer's output.
        activation_error: of the output of the activation function that follows; if not ``None``, minimized instead.
        descent: how the relaxed choices are found.

    Shape: ``weight`` [groups, 1, outputs, columns], in the dtype to compute in; ``grid`` and result the same.

    Raises: CalibrationError for float formats, whose grid points are not evenly spaced, and if ``error`` has only the
        diagonal blocks of the Gram matrix.
    """
    if isinstance(grid.spec.dtype, FloatDtype):
        raise CalibrationError(f"AdaRound needs codes that are integers, not {grid.spec.dtype}")
    if error.gram.shape[1] > 1:
        raise CalibrationError("AdaRound needs the Gram matrix of all columns, not of blocks")
    choices = RoundingChoices(weight, grid)
    nearest = grid.nearest(weight)
    objective = activation_error or error
    unit = _error_per_weight(weight - nearest, error if activation_error is None else activation_error)
    soft = _relaxed_choices(weight, choices, objective, unit, descent)
    rounded = choices.weight(soft.round())
    if activation_error is not None:
        is_better = activation_error.of(weight - rounded) <= activation_error.of(weight - nearest)
        return torch.where(is_better[..., None], rounded, nearest)
    rounded = coordinate_descent(weight[:, 0], rounded[:, 0], grid[:, 0], error)[:, None]
    is_better = error.of(weight - rounded) <= error.of(weight - nearest)
    return torch.where(is_better[..., None], rounded, nearest)


def _relaxed_choices(
    weight: Tensor, choices: RoundingChoices, error: OutputError | ActivationError, unit: Tensor,
    descent: RoundingDescent,
) -> Tensor:
    """``h(V)`` after gradient descent, close to 0 or 1; without meaning where both grid points are equal.

    Passes over the weights cost as much as the product in ``half_gradient``, so constants are multiplied beforehand.
    """
    variable = choices.initial_variable()
    first, second = torch.zeros_like(variable), torch.zeros_like(variable)
    free_step = choices.is_free * choices.scale
    from_lower = weight - choices.lower * choices.scale
    factor = free_step * (-2 / unit)
    for step in range(1, descent.iterations + 1):
        sigmoid = variable.sigmoid()
        stretched = sigmoid * (ZETA - GAMMA) + GAMMA
        soft = stretched.clamp(0, 1)
        derivative = sigmoid.addcmul_(sigmoid, sigmoid, value=-1).mul_(soft == stretched)  # dh / dV over ZETA - GAMMA
        gradient = error.half_gradient(from_lower.addcmul(soft, free_step, value=-1)).mul_(factor)
        progress = (step / descent.iterations - descent.warm_start) / (1 - descent.warm_start)
        if progress > 0:
            gradient.add_(_regularization_gradient(soft, progress), alpha=descent.regularization)
        gradient.mul_(derivative).mul_(ZETA - GAMMA)
        first.lerp_(gradient, 1 - ADAM_DECAYS[0])
        second.mul_(ADAM_DECAYS[1]).addcmul_(gradient, gradient, value=1 - ADAM_DECAYS[1])
        rate = descent.learning_rate * math.sqrt(1 - ADAM_DECAYS[1] ** step) / (1 - ADAM_DECAYS[0] ** step)
        variable.addcdiv_(first, second.sqrt().add_(1e-12), value=-rate)
    return (variable.sigmoid() * (ZETA - GAMMA) + GAMMA).clamp(0, 1)


class RoundingChoices:
    """The grid points below and above each weight; they are equal where the weight is clipped.

    Args:
        weight: float weights.
        grid: the grid points of every weight.
        near: grid points, of which each is one of the two; ``None``: the points next to the weight.

    Shape: one for all.
    """

    def __init__(self, weight: Tensor, grid: WeightGrid, near: Tensor | None = None) -> None:
        self.scale = grid.scale.masked_fill(grid.is_pruned, 1.0).to(weight.dtype)
        weight = weight.masked_fill(grid.is_pruned, 0.0)
        zero = torch.zeros_like(self.scale) if grid.zero_point is None else grid.zero_point.to(weight.dtype)
        unrounded = weight / self.scale
        floor = unrounded.floor()
        if near is not None:
            code = (near / self.scale).round()
            floor = torch.where(code > floor + 1, code - 1, torch.where(code < floor, code, floor))
        low, high = grid.spec.qmin - zero, grid.spec.qmax - zero
        self.lower = floor.clamp(low, high)
        self.upper = torch.where(grid.is_pruned, self.lower, (floor + 1).clamp(low, high))
        self.is_free = (self.upper > self.lower).to(weight.dtype)
        self.fraction = (unrounded - floor).clamp(1e-4, 1 - 1e-4)

    def initial_variable(self) -> Tensor:
        """The V for which the relaxed weights equal the float weights."""
        return -((ZETA - GAMMA) / (self.fraction - GAMMA) - 1).log()

    def weight(self, choice: Tensor) -> Tensor:
        return (self.lower + choice * self.is_free) * self.scale


def _regularization_gradient(soft: Tensor, progress: float) -> Tensor:
    """Derivative of ``1 - |2 soft - 1|^β``, with β annealed along a cosine."""
    beta = BETA[1] + 0.5 * (BETA[0] - BETA[1]) * (1 + math.cos(math.pi * progress))
    centered = 1 - 2 * soft
    return centered.abs().pow_(beta - 1).mul_(2 * beta).copysign_(centered)


def _error_per_weight(change: Tensor, error: OutputError | ActivationError) -> Tensor:
    """The error of a change of the weights, per weight: dᵀ H d / columns. Shape: [..., outputs, 1]."""
    quadratic = OutputError(error.gram) if isinstance(error, OutputError) else error
    per_weight = quadratic.of(change)[..., None] / change.shape[-1]
    return per_weight.clamp(min=torch.finfo(change.dtype).tiny ** 0.5)

