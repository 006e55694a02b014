"""Cholesky factors of large matrices on the CPU, where LAPACK's column-major results cost as much as the factors.

Left-looking by panels of columns (Golub and Van Loan, Matrix Computations, section 4.2.9): the flops are spent in
matrix products, and results are row-major.
"""

from __future__ import annotations

import torch
from torch import Tensor

PANEL = 256
"""Columns that are factored together."""


def cholesky_(matrix: Tensor) -> Tensor:
    """Overwrites the lower triangle of ``matrix`` with L, where ``L Lᵀ`` = ``matrix``; says where there is none.

    >>> matrix = torch.tensor([[[4.0, 2.0], [2.0, 5.0]]])
    >>> cholesky_(matrix).tolist(), matrix.tril()
    ([False], tensor([[[2., 0.],
             [1., 2.]]]))

    Args:
        matrix: symmetric; its upper triangle is not read, and afterwards of no meaning.

    Shape: ``matrix`` [groups, columns, columns]; result, bool, [groups].
    """
    columns = matrix.shape[-1]
    if columns <= PANEL or matrix.device.type != "cpu":
        factor, info = torch.linalg.cholesky_ex(matrix)
        matrix.copy_(factor)
        failed: Tensor = info != 0
        return failed
    failed = torch.zeros(len(matrix), dtype=torch.bool)
    for begin in range(0, columns, PANEL):
        end = min(begin + PANEL, columns)
        known, panel = matrix[:, begin:, :begin], matrix[:, begin:, begin:end]
        panel.baddbmm_(known, known[:, : end - begin].mT, alpha=-1)
        corner, info = torch.linalg.cholesky_ex(panel[:, : end - begin])
        failed |= info != 0
        matrix[:, begin:end, begin:end] = corner
        matrix[:, end:, begin:end] = torch.linalg.solve_triangular(corner.mT, panel[:, end - begin :], upper=True,
                                                                   left=False)
    return failed
