"""GPTQ: columns are rounded in order, each error propagated to the remaining columns through the Hessian.

With the damped Hessian ``H = L Lᵀ``, L lower triangular, the error of an output under ``d = w - ŵ`` is

    2 linear·d + dᵀ H d = |Lᵀ d + y|² + constant        y = L⁻¹ linear

whose i-th term holds the changes of column i and later ones alone. So columns are rounded from the last to the first,
each to where its term is least:

    ŵ_i = round(w_i + (y_i + Σ_{j>i} L_ji d_j) / L_ii)

This is Frantar et al., arXiv 2210.17323, equations 2 and 3, without the inverse of the Hessian (the equivalence is
arXiv 2507.18553).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qtk.algorithms.hessian_factor import HessianFactor, column_order
from qtk.algorithms.weight_grid import WeightGrid


def gptq(
    weight: Tensor, hessian: Tensor, grid: WeightGrid, linear: Tensor | None = None, *, damping: float = 0.01,
    act_order: bool = True, columns_at_once: int = 128,
) -> Tensor:
    """The weights, each rounded to its grid.

    Args:
        weight: float weights, in the dtype to compute in.
        hessian: ``X̂ᵀX̂``; factorized in its dtype, or in float64 if that fails.
        grid: the grid points of every weight.
        linear: the linear term of the error, ``None`` for 0.
        damping: added to the diagonal of the Hessian, as a multiple of its mean.
        act_order: round the columns with the largest diagonal of the Hessian first.
        columns_at_once: columns whose errors are propagated to the rest together; does not change the result.

    Shape: ``weight`` [groups, outputs, columns]; ``hessian`` [groups, columns, columns]; ``grid``, ``linear`` and
    result as ``weight``.

    Raises: CalibrationError if the damped Hessian is not positive definite.
    """
    factor = HessianFactor.of(hessian, column_order(hessian, act_order), damping, weight.dtype)
    return Feedback.of(weight, factor, linear).rounded(grid, columns_at_once)[0]


@dataclass(frozen=True, slots=True, eq=False)
class Feedback:
    """What GPTQ computes of a layer before it has a grid.

    Args:
        factor: of the Hessian; its last column is rounded first.
        weight: the float weights, their columns in the order of the factor.
        start: the weights plus ``y_i / L_ii``.

    Shape: ``weight`` and ``start`` [groups, outputs, columns].
    """

    factor: HessianFactor
    weight: Tensor
    start: Tensor

    @classmethod
    def of(cls, weight: Tensor, factor: HessianFactor, linear: Tensor | None) -> Feedback:
        """Arguments: as ``gptq``."""
        index = factor.order[:, None].expand(weight.shape)
        start = ordered = weight.gather(2, index)
        if linear is not None:
            start = ordered + factor.solved(linear.to(weight.dtype).gather(2, index)) / factor.diagonal
        return cls(factor, ordered, start)

    def rounded(self, grid: WeightGrid, columns_at_once: int) -> tuple[Tensor, Tensor]:
        """As ``gptq``, and ``missing``: what each weight was rounded from less what it became, in the factor's order.

        Shape: as the weights, both.
        """
        change, target, order = self.weight.clone(), self.start.clone(), self.factor.order
        missing, lower, diagonal = torch.empty_like(target), self.factor.lower, self.factor.diagonal
        space = lower.new_empty(len(lower), columns_at_once, order.shape[1])
        grid = grid.in_order(order)
        for end in range(order.shape[1], 0, -columns_at_once):
            block = slice(max(0, end - columns_at_once), end)
            propagation = space[:, : block.stop - block.start, :end]
            torch.div(lower[:, block, :end], diagonal[..., :end], out=propagation)
            target_block, change_block, rest = target[..., block], change[..., block], target[..., : block.start]
            torch.sub(target_block, change_block, out=missing[..., block])
            grid[..., block].round_with_feedback_(
                target_block, change_block, propagation[..., block].mT, backwards=True)
            missing[..., block].baddbmm_(change_block, propagation[..., block])
            rest.baddbmm_(change_block, propagation[..., : block.start])
        return self._in_place(target), missing

    def targets(self, rounded: Tensor, missing: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns what each weight was rounded from, what its squared rounding error counts, and the sums of both.

        The sums are the errors of the outputs without a constant. Arguments: results of ``rounded``.

        Shape: the first two results as the weights; last [groups, outputs].
        """
        power = self.factor.diagonal.square().expand_as(missing)
        return rounded + self._in_place(missing), self._in_place(power), (power * missing.square()).sum(-1)

    def _in_place(self, ordered: Tensor) -> Tensor:
        """Columns where they belong."""
        return torch.empty_like(ordered, memory_format=torch.contiguous_format).scatter_(
            2, self.factor.order[:, None].expand(ordered.shape), ordered)
