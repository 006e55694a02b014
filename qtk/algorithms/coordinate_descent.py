"""Coordinate descent on the rounding: one weight after the other moves to the grid point of least output error.

With ``d = w - ŵ`` and the half gradient ``g = linear + H d``, the error as a function of weight i alone is a parabola
with its minimum at ``ŵ_i + g_i / H_ii``, so that the nearest grid point is the best one (QuantEase, Behdin et al.,
arXiv 2309.01885, equation 8; CDQuant, arXiv 2406.17542). A pass goes through all columns once, and costs about one
product of the weights with the Hessian.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qtk.algorithms.output_error import OutputError
from qtk.algorithms.weight_grid import WeightGrid

MARGIN = 1e-3
"""Part of each step that is held back, so that no weight moves for a gain as small as a rounding error."""


def coordinate_descent(
    weight: Tensor, start: Tensor, grid: WeightGrid, error: OutputError, *, passes: int = 10
) -> Tensor:
    """The weights, each on its grid; no pass raises the error of an output.

    Args:
        weight: float weights, in the dtype to compute in.
        start: rounded weights to start from.
        grid: the grid points of every weight.
        error: of the layer's output, with the Gram matrix of all columns.
        passes: over all columns, at most; an output is settled after a pass that gains nothing.

    Shape: ``weight``, ``start``, ``grid`` and result [groups, outputs, columns].
    """
    descent = Descent.begin(weight, start, error)
    best, outputs = descent.rounded.clone(), torch.arange(weight.shape[1], device=weight.device)
    for _ in range(passes):
        is_lower = descent.run_pass(grid)
        best[:, outputs] = descent.rounded
        going_on = is_lower.any(0)
        if not bool(going_on.any()):
            break
        if not bool(going_on.all()):
            descent, grid, outputs = descent.of_outputs(going_on), grid[:, going_on], outputs[going_on]
    return best


@dataclass(frozen=True, slots=True, eq=False)
class Descent:
    """Rounded weights and what follows from them; a pass changes them in place.

    Args:
        error: of the layer's output, with the Gram matrix of all columns.
        change: of the float weights.
        rounded: the weights.
        half_gradient: of the error.

    Shape: all but ``error`` [groups, outputs, columns], without gaps.
    """

    error: OutputError
    change: Tensor
    rounded: Tensor
    half_gradient: Tensor

    @classmethod
    def begin(cls, weight: Tensor, start: Tensor, error: OutputError) -> Descent:
        """The descent from ``start``, which stays as it is.

        Args:
            weight: the float weights, in the dtype to compute in.
            start: rounded weights.
            error: of the layer's output, with the Gram matrix of all columns.
        """
        rounded = start.to(weight.dtype).clone(memory_format=torch.contiguous_format)
        change = weight.contiguous() - rounded
        return cls(error, change, rounded, error.half_gradient(change[:, None])[:, 0])

    def run_pass(self, grid: WeightGrid) -> Tensor:
        """Moves every weight once, but leaves the outputs as they were whose error does not fall.

        Returns: where it falls. Shape: bool [groups, outputs].
        """
        gram = self.error.gram[:, 0]
        diagonal = gram.diagonal(dim1=-2, dim2=-1)
        step = torch.where(diagonal > 0, (1 - MARGIN) / diagonal, 0.0)
        states = self.change, self.rounded, self.half_gradient
        before, former = self._errors(), [values.clone() for values in states]
        grid.descend_(self.rounded, self.change, self.half_gradient, gram, step)
        is_lower = self._errors() < before
        stays = ~is_lower
        for values, kept in zip(states, former, strict=True):
            values[stays] = kept[stays]
        return is_lower

    def of_outputs(self, outputs: Tensor) -> Descent:
        """The descent of some outputs alone."""
        return Descent(
            self.error.select(slice(None), outputs), self.change[:, outputs], self.rounded[:, outputs],
            self.half_gradient[:, outputs],
        )

    def _errors(self) -> Tensor:
        """Of each output, without its constant. Shape: [groups, outputs]."""
        terms = [self.half_gradient] if self.error.linear is None else [self.half_gradient, self.error.linear[:, 0]]
        return torch.stack([torch.einsum("goc,goc->go", term, self.change) for term in terms]).sum(0)
