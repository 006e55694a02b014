"""GPTQ: columns are rounded in order, each error propagated to the remaining columns through the inverse Hessian.

With ``H = X̂ᵀX̂`` damped to ``H + (damping · mean diag H) I`` and U the upper Cholesky factor of its inverse, rounding
column i changes every later column j by

    w_j ← w_j - (w_i - ŵ_i) / U_ii · U_ij

which is the update that minimizes the squared error of the layer's output. Frantar et al., arXiv 2210.17323, equations
2 and 3 in the Cholesky form of algorithm 1. The scales stay what they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qtk.algorithms.weight_grid import WeightGrid
from qtk.errors import CalibrationError


def gptq(
    weight: Tensor, hessian: Tensor, grid: WeightGrid, *, damping: float = 0.01, act_order: bool = True,
    columns_at_once: int = 128,
) -> Tensor:
    """The weights of one group of outputs, each rounded to its grid.

    Args:
        weight: float weights.
        hessian: ``X̂ᵀX̂``, in the dtype to compute in.
        grid: the grid points of every weight.
        damping: added to the diagonal of the Hessian, as a multiple of its mean.
        act_order: round the columns with the largest diagonal of the Hessian first.
        columns_at_once: columns whose errors are propagated to the rest together; does not change the result.

    Shape: ``weight`` [outputs, columns]; ``hessian`` [columns, columns]; ``grid`` and result as ``weight``.

    Raises: CalibrationError if the damped Hessian is not positive definite.
    """
    order = _column_order(hessian, act_order)
    factor = _inverse_factor(hessian[order][:, order], damping)
    remaining = weight[:, order].to(hessian.dtype)
    rounded = torch.empty_like(remaining)
    ordered_grid = grid[:, order]
    for begin in range(0, remaining.shape[1], columns_at_once):
        end = min(begin + columns_at_once, remaining.shape[1])
        errors = torch.zeros_like(remaining[:, begin:end])
        for index in range(begin, end):
            column = remaining[:, index]
            rounded_column = ordered_grid[:, index].nearest(column)
            rounded[:, index] = rounded_column
            errors[:, index - begin] = error = (column - rounded_column) / factor[index, index]
            remaining[:, index:end] -= error[:, None] * factor[index, index:end]
        remaining[:, end:] -= errors @ factor[begin:end, end:]
    result = torch.empty_like(rounded)
    result[:, order] = rounded
    return result.to(weight.dtype)


def solve_damped(hessian: Tensor, right: Tensor, damping: float) -> Tensor:
    """``x`` with ``H x = right`` for the damped Hessian.

    Shape: ``hessian`` [columns, columns]; ``right`` and result [outputs, columns].

    Raises: CalibrationError if the damped Hessian is not positive definite.
    """
    return torch.cholesky_solve(right.mT, _cholesky(_damped(hessian, damping), damping)).mT


def _column_order(hessian: Tensor, act_order: bool) -> Tensor:
    diagonal = hessian.diagonal()
    if act_order:
        return diagonal.argsort(descending=True, stable=True)
    return torch.arange(len(diagonal), device=hessian.device)


def _inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """U, upper triangular, with ``Uᵀ U = H⁻¹``."""
    inverse = torch.cholesky_inverse(_cholesky(_damped(hessian, damping), damping))
    return _cholesky(inverse, damping, upper=True)


def _damped(hessian: Tensor, damping: float) -> Tensor:
    """Adds the damping; columns whose inputs are all zero get a diagonal of 1, so that the matrix is invertible."""
    diagonal = hessian.diagonal()
    damped = hessian.clone()
    damped.diagonal().copy_(torch.where(diagonal == 0, 1.0, diagonal) + damping * diagonal.mean())
    return damped


def _cholesky(matrix: Tensor, damping: float, *, upper: bool = False) -> Tensor:
    factor: Tensor
    factor, failed = torch.linalg.cholesky_ex(matrix, upper=upper)
    if bool(failed):
        raise CalibrationError(f"the inputs of this layer are too alike for a damping of {damping}: its Hessian has no "
                               "inverse; use more data or a larger damping")
    return factor
