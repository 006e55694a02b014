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

from qtk.algorithms.cholesky import cholesky
from qtk.algorithms.weight_grid import WeightGrid
from qtk.errors import CalibrationError


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
    return Feedback.of(weight, hessian, linear, damping, act_order).rounded(grid, columns_at_once)[0]


@dataclass(frozen=True, slots=True, eq=False)
class Feedback:
    """What GPTQ computes of a layer before it has a grid.

    Args:
        order: the columns, the first to be rounded last.
        weight: the float weights, their columns in this order.
        start: the weights plus ``y_i / L_ii``.
        factor: ``L_ji / L_ii`` in column i.
        diagonal: ``L_ii``.

    Shape: ``order`` int64 [groups, columns]; ``weight`` and ``start`` [groups, outputs, columns]; ``factor`` [groups,
    columns, columns]; ``diagonal`` [groups, 1, columns].
    """

    order: Tensor
    weight: Tensor
    start: Tensor
    factor: Tensor
    diagonal: Tensor

    @classmethod
    def of(cls, weight: Tensor, hessian: Tensor, linear: Tensor | None, damping: float, act_order: bool) -> Feedback:
        """Arguments and errors: as ``gptq``."""
        order = _column_order(hessian, act_order)
        index = order[:, None].expand(weight.shape)
        factor = damped_factor(in_order(hessian, order), damping).to(weight.dtype)
        diagonal = factor.diagonal(dim1=-2, dim2=-1)[:, None].clone()
        start = ordered = weight.gather(2, index)
        if linear is not None:
            shift = linear.to(weight.dtype).gather(2, index)
            start = ordered + torch.linalg.solve_triangular(factor.mT, shift, upper=True, left=False) / diagonal
        return cls(order, ordered, start, factor.div_(diagonal), diagonal)

    def rounded(self, grid: WeightGrid, columns_at_once: int) -> tuple[Tensor, Tensor]:
        """As ``gptq``, and ``missing``: in ``order``, what each weight was rounded from less what it became.

        Shape: as the weights, both.
        """
        change, target, propagation = self.weight.clone(), self.start.clone(), self.factor.mT
        missing = torch.empty_like(target)
        grid = grid.in_order(self.order)
        for end in range(self.order.shape[1], 0, -columns_at_once):
            block = slice(max(0, end - columns_at_once), end)
            target_block, change_block, rest = target[..., block], change[..., block], target[..., : block.start]
            torch.sub(target_block, change_block, out=missing[..., block])
            grid[..., block].round_with_feedback_(
                target_block, change_block, propagation[:, block, block], backwards=True)
            missing[..., block].baddbmm_(change_block, self.factor[:, block, block])
            rest.baddbmm_(change_block, propagation[:, : block.start, block].mT)
        return self._in_place(target), missing

    def targets(self, rounded: Tensor, missing: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns what each weight was rounded from, what its squared rounding error counts, and the sums of both.

        The sums are the errors of the outputs without a constant. Arguments: results of ``rounded``.

        Shape: the first two results as the weights; last [groups, outputs].
        """
        power = self.diagonal.square().expand_as(missing)
        return rounded + self._in_place(missing), self._in_place(power), (power * missing.square()).sum(-1)

    def _in_place(self, ordered: Tensor) -> Tensor:
        """Columns where they belong."""
        return torch.empty_like(ordered, memory_format=torch.contiguous_format).scatter_(
            2, self.order[:, None].expand(ordered.shape), ordered)


def _column_order(hessian: Tensor, act_order: bool) -> Tensor:
    """The columns, the first to be rounded last. Shape: int64 [groups, columns]."""
    diagonal = hessian.diagonal(dim1=-2, dim2=-1)
    if act_order:
        return diagonal.argsort(descending=True, stable=True).flip(1)
    return torch.arange(diagonal.shape[1], device=hessian.device).flip(0).expand(diagonal.shape)


def in_order(matrix: Tensor, order: Tensor) -> Tensor:
    """A copy with its rows and columns in another order. Shape: as ``matrix``, [groups, columns, columns]."""
    result = torch.empty_like(matrix, memory_format=torch.contiguous_format)
    for into, each, columns in zip(result, matrix, order, strict=True):
        torch.index_select(each.index_select(0, columns), 1, columns, out=into)
    return result


def damped_factor(hessian: Tensor, damping: float) -> Tensor:
    """L, lower triangular, with ``L Lᵀ = H`` for the damped H, which ``hessian`` becomes.

    Columns whose inputs are all zero get a diagonal of 1, so that there is one.
    """
    diagonal = hessian.diagonal(dim1=-2, dim2=-1)
    diagonal += torch.where(diagonal == 0, 1.0, 0.0) + damping * diagonal.mean(-1, keepdim=True)
    factor, failed = cholesky(hessian)
    if bool(failed.any()) and hessian.dtype != torch.float64:
        factor, failed = cholesky(hessian.to(torch.float64))
    if bool(failed.any()):
        raise CalibrationError(f"the Hessian of this layer has no inverse with a damping of {damping}: the inputs are "
                               "too correlated; use more data or a larger damping")
    return factor
