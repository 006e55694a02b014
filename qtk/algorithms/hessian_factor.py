"""The Cholesky factor of a damped Hessian, its columns in the order in which methods go through them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qtk.algorithms.cholesky import PANEL, cholesky
from qtk.errors import CalibrationError


@dataclass(frozen=True, slots=True, eq=False)
class HessianFactor:
    """L, lower triangular with a diagonal of ones, and the diagonal matrix D with ``L D Lᵀ = H`` for the damped H.

    Args:
        order: the columns of the weights, in the order of L.
        lower: L.
        power: the diagonal of D: of each column's power, what the columns before it do not determine.

    Shape: ``order`` int64 [groups, columns]; ``lower`` [groups, columns, columns]; ``power`` [groups, 1, columns].
    """

    order: Tensor
    lower: Tensor
    power: Tensor

    @classmethod
    def of(cls, hessian: Tensor, order: Tensor, damping: float, dtype: torch.dtype) -> HessianFactor:
        """Factorizes in the dtype of the Hessian, which does not change, or in float64 if that fails.

        Columns whose inputs are all zero get a diagonal of 1, so that there is a factor.

        Args:
            hessian: ``X̂ᵀX̂``, without damping.
            order: see above.
            damping: added to the diagonal, as a multiple of its mean.
            dtype: of the result.

        Shape: ``hessian`` [groups, columns, columns].

        Raises: CalibrationError if the damped Hessian is not positive definite.
        """
        factor, failed = cholesky(_damped(hessian, order, damping))
        if bool(failed.any()) and hessian.dtype != torch.float64:
            factor, failed = cholesky(_damped(hessian, order, damping).to(torch.float64))
        if bool(failed.any()):
            raise CalibrationError(f"the Hessian of this layer has no inverse with a damping of {damping}: the inputs "
                                   "are too correlated; use more data or a larger damping")
        diagonal = factor.diagonal(dim1=-2, dim2=-1)[:, None].clone()
        return cls(order, factor.div_(diagonal).to(dtype), diagonal.square().to(dtype))

    def solved(self, values: Tensor) -> Tensor:
        """``D⁻¹ L⁻¹ v`` for the ``v`` of each output.

        Shape: ``values``, their columns in the order of L, and result [groups, outputs, columns].
        """
        solved: Tensor = torch.linalg.solve_triangular(self.lower, values.mT, upper=False, unitriangular=True).mT
        return solved.div_(self.power)


def column_order(hessian: Tensor, act_order: bool) -> Tensor:
    """The columns, backwards, or with ``act_order`` by the power of their inputs: the last is rounded first.

    Shape: int64 [groups, columns].
    """
    diagonal = hessian.diagonal(dim1=-2, dim2=-1)
    if act_order:
        return diagonal.argsort(descending=True, stable=True).flip(1)
    return torch.arange(diagonal.shape[1], device=hessian.device).flip(0).expand(diagonal.shape)


def _damped(hessian: Tensor, order: Tensor, damping: float) -> Tensor:
    """The Hessian in another order, damped; above its diagonal it is undefined."""
    result = torch.empty_like(hessian, memory_format=torch.contiguous_format)
    for into, each, columns in zip(result, hessian, order, strict=True):
        for begin in range(0, len(columns), PANEL):
            end = begin + PANEL
            index = columns[:end].expand(len(columns[begin:end]), -1)
            torch.gather(each.index_select(0, columns[begin:end]), 1, index, out=into[begin:end, :end])
    diagonal = result.diagonal(dim1=-2, dim2=-1)
    diagonal += torch.where(diagonal == 0, 1.0, 0.0) + damping * diagonal.mean(-1, keepdim=True)
    return result
