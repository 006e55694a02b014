"""GPTQ: columns are rounded one after the other, and what each loses is made up for by those still to come.

With ``U`` the upper Cholesky factor of the inverse of the damped Gram matrix, rounding column i of the weights changes
the later ones by ``-(w_i - ŵ_i) / U_ii · U_ij``: the least squared error of the output that they can reach. (Frantar et
al., arXiv 2210.17323, algorithm 1.) The scales stay what they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qtk.errors import CalibrationError
from qtk.numerics.affine import expand
from qtk.ops.fake_quantize import fake_quantize


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

    def rounded(
        self,
        weight: Tensor,
        gram: Tensor,
        scale: Tensor,
        zero_point: Tensor | None,
        block_size: Sequence[int],
        qmin: int,
        qmax: int,
    ) -> Tensor:
        """The weights, each on the grid of its scale.

        Shape: ``weight`` [outputs, columns]; ``gram`` [columns, columns], of the columns of the input, in the dtype to
        compute in; ``scale`` and ``zero_point`` the qparam shape of ``block_size``; result as ``weight``.

        Raises: CalibrationError if the Gram matrix has no inverse even so; SpecError if scales do not fit.
        """
        steps = expand(scale, weight.shape, block_size).expand(weight.shape)
        zeros = None if zero_point is None else expand(zero_point, weight.shape, block_size).expand(weight.shape)
        order = self._order(gram)
        factor = self._factor(gram[order][:, order])
        left = weight[:, order].to(gram.dtype)
        dead = gram.diagonal()[order] == 0  # inputs that are always 0: their weights do nothing
        left[:, dead] = 0
        result = torch.empty_like(left)
        grid = steps[:, order], None if zeros is None else zeros[:, order].to(torch.int32)
        for begin in range(0, left.shape[1], self.columns_at_once):
            end = min(begin + self.columns_at_once, left.shape[1])
            lost = torch.zeros_like(left[:, begin:end])
            for column in range(begin, end):
                own = left[:, column]
                near = self._nearest(own, grid, column, qmin, qmax)
                result[:, column] = near
                lost[:, column - begin] = error = (own - near) / factor[column, column]
                left[:, column:end] -= error[:, None] * factor[column, column:end]
            left[:, end:] -= lost @ factor[begin:end, end:]
        back = torch.empty_like(result)
        back[:, order] = result
        return back.to(weight.dtype)

    def _order(self, gram: Tensor) -> Tensor:
        diagonal = gram.diagonal()
        if self.act_order:
            return diagonal.argsort(descending=True, stable=True)
        return torch.arange(len(diagonal), device=gram.device)

    def _factor(self, gram: Tensor) -> Tensor:
        diagonal = gram.diagonal()
        full = torch.where(diagonal == 0, 1.0, diagonal) + self.damping * diagonal.mean()
        damped = gram.clone()
        damped.diagonal().copy_(full)
        lower, failed = torch.linalg.cholesky_ex(damped)
        self._refuse(bool(failed))
        found = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        self._refuse(bool(found.info))
        factor: Tensor = found.L
        return factor

    def _refuse(self, failed: bool) -> None:
        if failed:
            raise CalibrationError(f"the inputs of this layer are too alike for a damping of {self.damping}; "
                                   "use more data or a larger damping")

    def _nearest(
        self, column: Tensor, grid: tuple[Tensor, Tensor | None], index: int, qmin: int, qmax: int
    ) -> Tensor:
        scale, zero = grid[0][:, index].contiguous(), None if grid[1] is None else grid[1][:, index].contiguous()
        return fake_quantize(column.to(torch.float32), scale, zero, (1,), qmin, qmax).to(column.dtype)
