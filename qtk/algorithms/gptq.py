"""GPTQ: columns are rounded one after the other, and what each loses is made up for by those still to come.

With ``U`` the upper Cholesky factor of the inverse of the damped Gram matrix, rounding column i of the weights changes
the later ones by ``-(w_i - ŵ_i) / U_ii · U_ij``: the least squared error of the output that they can reach. (Frantar et
al., arXiv 2210.17323, algorithm 1.) The scales stay what they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qtk.algorithms.grid import Grid
from qtk.errors import CalibrationError


@dataclass(frozen=True, slots=True)
class Gptq:
    """How columns are taken.

    Args:
        damping: added to the diagonal of the Gram matrix, in means of it.
        act_order: take the columns with the largest inputs first.
        columns_at_once: columns whose changes are applied to the rest together; it does not change the result.
    """

    damping: float = 0.01
    act_order: bool = True
    columns_at_once: int = 128

    def __post_init__(self) -> None:
        if not self.damping > 0 or self.columns_at_once < 1:
            raise CalibrationError(f"GPTQ needs damping > 0 and columns_at_once ≥ 1, got {self.damping} and "
                                   f"{self.columns_at_once}")

    def rounded(self, weight: Tensor, gram: Tensor, grid: Grid) -> Tensor:
        """The weights, each on its grid.

        Shape: ``weight`` [outputs, columns]; ``gram`` [columns, columns], of the columns of the input, in the dtype to
        compute in; ``grid`` and result as ``weight``.

        Raises: CalibrationError if the Gram matrix has no inverse even so.
        """
        order = self._order(gram)
        factor = self._factor(gram[order][:, order])
        left = weight[:, order].to(gram.dtype)
        result = torch.empty_like(left)
        ordered = grid[:, order]
        for begin in range(0, left.shape[1], self.columns_at_once):
            end = min(begin + self.columns_at_once, left.shape[1])
            lost = torch.zeros_like(left[:, begin:end])
            for column in range(begin, end):
                own = left[:, column]
                near = ordered[:, column].nearest(own)
                result[:, column] = near
                lost[:, column - begin] = error = (own - near) / factor[column, column]
                left[:, column:end] -= error[:, None] * factor[column, column:end]
            left[:, end:] -= lost @ factor[begin:end, end:]
        back = torch.empty_like(result)
        back[:, order] = result
        return back.to(weight.dtype)

    def solved(self, gram: Tensor, right: Tensor) -> Tensor:
        """``x`` with ``H x = right`` for the damped Gram matrix. Shape: ``right`` and result [outputs, columns]."""
        lower, failed = torch.linalg.cholesky_ex(self._damped(gram))
        self._refuse(bool(failed))
        return torch.cholesky_solve(right.mT, lower).mT

    def _order(self, gram: Tensor) -> Tensor:
        diagonal = gram.diagonal()
        if self.act_order:
            return diagonal.argsort(descending=True, stable=True)
        return torch.arange(len(diagonal), device=gram.device)

    def _factor(self, gram: Tensor) -> Tensor:
        lower, failed = torch.linalg.cholesky_ex(self._damped(gram))
        self._refuse(bool(failed))
        found = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        self._refuse(bool(found.info))
        factor: Tensor = found.L
        return factor

    def _damped(self, gram: Tensor) -> Tensor:
        diagonal = gram.diagonal()
        damped = gram.clone()
        damped.diagonal().copy_(torch.where(diagonal == 0, 1.0, diagonal) + self.damping * diagonal.mean())
        return damped

    def _refuse(self, failed: bool) -> None:
        if failed:
            raise CalibrationError(f"the inputs of this layer are too alike for a damping of {self.damping}; "
                                   "use more data or a larger damping")
