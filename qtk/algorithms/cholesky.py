"""Cholesky factors of large matrices on the CPU, where LAPACK's column-major results cost as much as the factors.

Left-looking by panels of columns (Golub and Van Loan, Matrix Computations, section 4.2.9): the flops are spent in
matrix products, and the results are row-major and take the place of the matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor

PANEL = 256
"""Columns that are factored together."""


def cholesky(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """L, lower triangular, with ``L Lᵀ`` = ``matrix``, and where there is none.

    >>> factor, failed = cholesky(torch.tensor([[[4.0, 2.0], [2.0, 5.0]]]))
    >>> factor, failed.tolist()
    (tensor([[[2., 0.],
             [1., 2.]]]), [False])

    Args:
        matrix: symmetric; its upper triangle is not read. It may change: a large one on the CPU becomes L.

    Shape: ``matrix`` and first result [groups, columns, columns]; second, bool, [groups].
    """
    columns = matrix.shape[-1]
    if columns <= PANEL or matrix.device.type != "cpu":
        factor, info = torch.linalg.cholesky_ex(matrix)
        return factor, info != 0
    failed = torch.zeros(len(matrix), dtype=torch.bool)
    for begin in range(0, columns, PANEL):
        end = min(begin + PANEL, columns)
        known = matrix[:, begin:, :begin]
        panel = torch.baddbmm(matrix[:, begin:, begin:end], known, known[:, : end - begin].mT, alpha=-1)
        corner, info = torch.linalg.cholesky_ex(panel[:, : end - begin])
        failed |= info != 0
        matrix[:, begin:end, begin:end] = corner
        below = torch.linalg.solve_triangular(corner, panel[:, end - begin :].mT, upper=False)
        matrix[:, end:, begin:end] = below.mT
        matrix[:, begin:end, end:] = 0
    return matrix, failed
