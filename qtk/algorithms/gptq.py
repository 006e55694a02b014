"""GPTQ: columns are rounded in order, each error propagated to the remaining columns through the Hessian.

With the damped Hessian ``H = L D Lᵀ``, D diagonal, L lower triangular with a diagonal of ones, the error of an output
under ``d = w - ŵ`` is

    2 linear·d + dᵀ H d = Σ_i D_ii (Lᵀ d + y)_i² + constant        y = D⁻¹ L⁻¹ linear

whose i-th term holds the changes of column i and later ones alone. So columns are rounded from the last to the first,
each to where its term is least:

    ŵ_i = round(w_i + y_i + Σ_{j>i} L_ji d_j)

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
    feedback = Feedback.of(weight, factor, linear)
    return feedback.in_place(feedback.rounded(grid, columns_at_once).weight)


@dataclass(frozen=True, slots=True, eq=False)
class Feedback:
    """What GPTQ computes of a layer before it has a grid.

    Args:
        factor: of the Hessian; its last column is rounded first.
        weight: the float weights, their columns in the order of the factor.
        start: the weights plus y.

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
            start = ordered + factor.solved(linear.to(weight.dtype).gather(2, index))
        return cls(factor, ordered, start)

    def rounded(self, grid: WeightGrid, columns_at_once: int) -> Rounded:
        """Arguments: as ``gptq``."""
        change, target, lower = self.weight.clone(), self.start.clone(), self.factor.lower
        missing = torch.empty_like(target)
        grid = grid.in_order(self.factor.order)
        for end in range(lower.shape[-1], 0, -columns_at_once):
            block = slice(max(0, end - columns_at_once), end)
            target_block, change_block, corner = target[..., block], change[..., block], lower[:, block, block]
            torch.sub(target_block, change_block, out=missing[..., block])
            grid[..., block].round_with_feedback_(target_block, change_block, corner.mT, backwards=True)
            missing[..., block].baddbmm_(change_block, corner)
            target[..., : block.start].baddbmm_(change_block, lower[:, block, : block.start])
        return Rounded(target, missing, (missing.square() @ self.factor.power.mT)[..., 0])

    def in_place(self, ordered: Tensor) -> Tensor:
        """Columns in the order of the factor where they belong. Shape: as the weights, or of one output."""
        return torch.empty_like(ordered, memory_format=torch.contiguous_format).scatter_(
            2, self.factor.order[:, None].expand(ordered.shape), ordered)


@dataclass(frozen=True, slots=True, eq=False)
class Rounded:
    """What GPTQ makes of a layer, the columns in the order of the factor.

    Args:
        weight: on the grid.
        missing: what each weight was rounded from less what it became; its square counts ``HessianFactor.power``.
        lost: the errors of the outputs under the damped Hessian, without a constant.

    Shape: ``weight`` and ``missing`` as the weights; ``lost`` [groups, outputs].
    """

    weight: Tensor
    missing: Tensor
    lost: Tensor
