"""GPTQ: columns are rounded in order, each error propagated to the remaining columns through the Hessian.

With the damped Hessian ``H = L Lᵀ``, L lower triangular, the error of an output under ``d = w - ŵ`` is

    2 linear·d + dᵀ H d = |Lᵀ d + y|² + constant        y = L⁻¹ linear

whose i-th term holds the changes of column i and later ones alone. So columns are rounded from the last to the first,
each to where its term is least:

    ŵ_i = round(w_i + (y_i + Σ_{j>i} L_ji d_j) / L_ii)

This is Frantar et al., arXiv 2210.17323, equations 2 and 3, without the inverse of the Hessian (the equivalence is
arXiv 2507.18553). The scales stay what they are.
"""

from __future__ import annotations

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
    order = _column_order(hessian, act_order)
    index = order[:, None].expand(weight.shape)
    factor = damped_factor(in_order(hessian, order), damping).to(weight.dtype)
    diagonal = factor.diagonal(dim1=-2, dim2=-1)[:, None].clone()
    change = weight.gather(2, index)
    target = change.clone()
    if linear is not None:
        ordered = linear.to(weight.dtype).gather(2, index)
        target += torch.linalg.solve_triangular(factor.mT, ordered, upper=True, left=False) / diagonal
    propagation = factor.div_(diagonal).mT  # L_ji / L_ii in row i
    grid = grid.in_order(order)
    for end in range(order.shape[1], 0, -columns_at_once):
        block = slice(max(0, end - columns_at_once), end)
        target_block, change_block, rest = target[..., block], change[..., block], target[..., : block.start]
        grid[..., block].round_with_feedback_(target_block, change_block, propagation[:, block, block], backwards=True)
        rest.baddbmm_(change_block, propagation[:, : block.start, block].mT)
    return torch.empty_like(target).scatter_(2, index, target)


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
