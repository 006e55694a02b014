"""``qtk::least_candidate``: the candidate range of each row that quantizes it with the least error.

Formula in ``qtk.numerics.candidate_errors``. It carries no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qtk.ops.candidate_errors import candidate_errors
from qtk.ops.registration import register

AT_ONCE = 1 << 20
"""Elements of a row summed together: 8 MiB of values in float64, and as much of counts."""

FINALISTS = 8
ROUGHLY = 1e-3
"""Bound of the relative error of sums in float32, where a step is many units in the last place."""
DIGIT = 2.0**-21
"""Bound of the rounding error of one x - x̂ in float32, relative to x."""
FEW_CODES = 1 << 10


def _sums(
    rows: Tensor, scales: Tensor, zero_points: Tensor | None, qmin: int, qmax: int, counts: Tensor | None,
    clipped: float, norm: float, dtype: torch.dtype,
) -> Tensor:
    """Shape: [candidates, scales]."""
    errors = torch.zeros(scales.shape, dtype=torch.float64, device=scales.device)
    for begin in range(0, rows.shape[1], AT_ONCE):
        here = slice(begin, begin + AT_ONCE)
        errors += candidate_errors(
            rows[:, here].to(dtype), scales.to(dtype), zero_points, (1, -1), qmin, qmax, norm=norm,
            importance=None if counts is None else counts[:, here], clipped=clipped)
    return errors


def _reference(
    rows: Tensor, scales: Tensor, zero_points: Tensor | None, qmin: int, qmax: int, counts: Tensor | None = None,
    clipped: float = 1.0, norm: float = 2.0,
) -> Tensor:
    """Long sums are computed in float32 first, and only the finalists in float64.

    Whether the outermost value is clipped may depend on its last bit: where clipping has a weight of its own, all sums
    are in float64.
    """
    def sums(scales: Tensor, zeros: Tensor | None, dtype: torch.dtype, of: Tensor | slice = slice(None)) -> Tensor:
        return _sums(rows[of], scales, zeros, qmin, qmax, None if counts is None else counts[of], clipped, norm, dtype)

    if counts is not None or clipped != 1 or qmax - qmin >= FEW_CODES or len(scales) <= 2 * FINALISTS:
        return sums(scales, zero_points, torch.float64).argmin(0)
    rough = sums(scales, zero_points, torch.float32)
    lost = rows.shape[1] * (rows.abs().amax(1).to(torch.float64) * DIGIT) ** norm
    is_close = rough <= rough.amin(0) * (1 + ROUGHLY) + lost
    rank = torch.arange(len(scales), 0, -1, device=rough.device)[:, None]  # the first is the highest
    finalists = torch.where(is_close, rank, 0).topk(FINALISTS, 0).indices.sort(0).values
    zeros = None if zero_points is None else zero_points.gather(0, finalists)
    errors = sums(scales.gather(0, finalists), zeros, torch.float64)
    best = finalists.gather(0, errors.argmin(0, keepdim=True))[0]
    has_many = is_close.sum(0) > FINALISTS
    if bool(has_many.any()):
        zeros = None if zero_points is None else zero_points[:, has_many]
        best[has_many] = sums(scales[:, has_many], zeros, torch.float64, has_many).argmin(0)
    return best


_OP = register(
    "least_candidate(Tensor rows, Tensor scales, Tensor? zero_points, int qmin, int qmax, Tensor? counts, "
    "float clipped) -> Tensor",
    _reference, lambda rows, *_: rows.new_empty(len(rows), dtype=torch.int64), native=True,
)


def least_candidate(
    rows: Tensor, scales: Tensor, zero_points: Tensor | None, qmin: int, qmax: int, *, norm: float = 2.0,
    counts: Tensor | None = None, clipped: float = 1.0,
) -> Tensor:
    """Index of the first candidate of least ``Σ counts · |x - x̂|^norm`` for each row, in float64.

    The error of clipped elements is multiplied by ``clipped``. Norm 2 has a kernel.

    Shape: ``rows`` floating [scales, n], ``counts`` likewise or ``None``: each counts once; ``scales`` float32 and
    ``zero_points`` int32 [candidates, scales]; result int64 [scales].

    >>> least_candidate(torch.tensor([[0.5, 1.5]]), torch.tensor([[1.0], [0.5]]), None, -8, 7)
    tensor([1])
    """
    if norm != 2:
        return _reference(rows, scales, zero_points, qmin, qmax, counts, clipped, norm)
    index: Tensor = _OP(rows, scales, zero_points, qmin, qmax, counts, clipped)
    return index
