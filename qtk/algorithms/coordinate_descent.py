"""Coordinate descent on the rounding: one weight after the other moves to the grid point of least output error.

With ``d = w - ŵ`` and the half gradient ``g = linear + H d``, the error as a function of weight i alone is a parabola
with its minimum at ``ŵ_i + g_i / H_ii``, so that the nearest grid point is the best one (QuantEase, Behdin et al.,
arXiv 2309.01885, equation 8; CDQuant, arXiv 2406.17542). A pass goes through all columns once, and costs about one
product of the weights with the Hessian.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qtk.algorithms.output_error import OutputError
from qtk.algorithms.weight_grid import WeightGrid

MARGIN = 1e-3
"""Part of each step that is held back, so that no weight moves for a gain as small as a rounding error."""


def coordinate_descent(
    weight: Tensor, start: Tensor, grid: WeightGrid, error: OutputError, *, passes: int = 10,
    columns_at_once: int = 128, half_gradient: Tensor | None = None,
) -> Tensor:
    """The weights, each on its grid; no pass raises the error of an output.

    Args:
        weight: float weights, in the dtype to compute in.
        start: rounded weights to start from.
        grid: the grid points of every weight.
        error: of the layer's output, with the Gram matrix of all columns.
        passes: over all columns, at most; an output is settled after a pass that gains nothing.
        columns_at_once: columns whose changes are propagated to the rest together; does not change the result.

        half_gradient: of ``start``, if it is known; changed in place to that of the result.

    Shape: ``weight``, ``start``, ``grid``, ``half_gradient`` and result [groups, outputs, columns].
    """
    if half_gradient is None:
        half_gradient = error.half_gradient((weight - start)[:, None])[:, 0]
    descent = _Descent.begin(weight, start.to(weight.dtype), grid, error, half_gradient)
    best, outputs = start.clone(), torch.arange(weight.shape[1], device=weight.device)
    for _ in range(passes):
        before = descent.error()
        descent.run_pass(columns_at_once)
        is_lower = descent.error() < before
        settled = ~is_lower.any(0)
        if bool(settled.all()):
            break
        if bool(settled.any()):
            going_on = (~settled).nonzero().flatten()
            descent, outputs, is_lower = descent.of_outputs(going_on), outputs[going_on], is_lower[:, going_on]
        for kept, found in ((best, descent.rounded), (half_gradient, descent.half_gradient)):
            kept[:, outputs] = torch.where(is_lower[..., None], found.permute(1, 2, 0), kept[:, outputs])
    return best


@dataclass(frozen=True, slots=True, eq=False)
class _Descent:
    """Rounded weights and what follows from them; a pass changes them in place.

    Shape: ``gram`` [groups, columns, columns]; ``step``, 1 / H_ii, [columns, groups, 1]; the rest [columns, groups,
    outputs].
    """

    gram: Tensor
    step: Tensor
    grid: WeightGrid
    linear: Tensor | None
    rounded: Tensor
    change: Tensor
    half_gradient: Tensor

    @classmethod
    def begin(
        cls, weight: Tensor, start: Tensor, grid: WeightGrid, error: OutputError, half_gradient: Tensor
    ) -> _Descent:
        diagonal = error.gram[:, 0].diagonal(dim1=-2, dim2=-1)
        step = torch.where(diagonal > 0, (1 - MARGIN) / diagonal, 0.0).mT[..., None]
        linear = None if error.linear is None else _by_column(error.linear[:, 0])
        return cls(error.gram[:, 0], step, grid.by_column(), linear, *map(_by_column, (start, weight - start,
                                                                                     half_gradient)))

    def error(self) -> Tensor:
        """Of each output, without its constant. Shape: [groups, outputs]."""
        summand = self.half_gradient if self.linear is None else self.half_gradient + self.linear
        return (summand * self.change).sum(0)

    def run_pass(self, columns_at_once: int) -> None:
        """Moves every weight once."""
        for begin in range(0, len(self.change), columns_at_once):
            block = slice(begin, begin + columns_at_once)
            rounded, step = self.rounded[block], self.step[block]
            moves = rounded.clone()  # becomes that of the change d
            rounded.addcmul_(self.half_gradient[block], step)
            feedback = self.gram[:, block, block] * step.transpose(0, 1)
            self.grid[block].round_with_feedback_(rounded, moves, feedback, backwards=False)
            self.change[block] += moves
            self.half_gradient.transpose(0, 1).baddbmm_(self.gram[:, :, block], moves.transpose(0, 1))

    def of_outputs(self, outputs: Tensor) -> _Descent:
        """The descent of some outputs alone."""
        rounded, change, half_gradient = (
            values.index_select(-1, outputs) for values in (self.rounded, self.change, self.half_gradient)
        )
        return replace(
            self, grid=self.grid[:, :, outputs], linear=None if self.linear is None else self.linear[..., outputs],
            rounded=rounded, change=change, half_gradient=half_gradient,
        )


def _by_column(values: Tensor) -> Tensor:
    """A copy. Shape: [groups, outputs, columns]; result [columns, groups, outputs]."""
    return values.permute(2, 0, 1).clone(memory_format=torch.contiguous_format)
