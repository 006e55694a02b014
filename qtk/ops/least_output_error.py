"""``qtk::least_output_error``: the candidate range of each row of a weight that changes an output least.

With d = x - x̂ over the n elements x of a row, the error of a range is ``Σ d² + mean (Σ d)² / n + gain (Σ d x)² / Σ x²``
(``qtk.calibrators.weight_mse`` has the reason). It carries no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qtk.ops.fake_quantize import fake_quantize
from qtk.ops.registration import register

AT_ONCE = 1 << 16
"""Elements that are compared together: they and their changes stay in a cache; on GPUs 256 times as many."""


def output_errors(
    rows: Tensor, scales: Tensor, zero_points: Tensor | None, qmin: int, qmax: int, mean: float, gain: float,
    counts: Tensor | None = None,
) -> Tensor:
    """The error of every candidate for every row, each element counted ``counts`` times.

    Shape: ``rows`` and ``counts`` [scales, n]; ``scales`` and ``zero_points`` [candidates, scales]; result likewise,
    float64.
    """
    values, weight = rows.to(torch.float32), None if counts is None else counts.to(torch.float32)

    def summed(x: Tensor) -> Tensor:
        return (x if weight is None else x * weight).sum(1, dtype=torch.float64)

    power, count = summed(values * values), summed(torch.ones_like(values))
    errors = torch.empty(scales.shape, dtype=torch.float64, device=scales.device)
    for candidate, scale in enumerate(scales):
        zeros = None if zero_points is None else zero_points[candidate]
        change = values - fake_quantize(values, scale, zeros, (1, -1), qmin, qmax)
        along_mean, along_row = summed(change) ** 2 / count, summed(change * values) ** 2 / power
        errors[candidate] = summed(change * change) + mean * along_mean + gain * along_row
    return errors


def _reference(
    rows: Tensor, scales: Tensor, zero_points: Tensor | None, qmin: int, qmax: int, mean: float, gain: float,
    counts: Tensor | None = None,
) -> Tensor:
    elements = AT_ONCE if rows.device.type == "cpu" else AT_ONCE << 8
    at_once, best = max(1, elements // max(1, rows.shape[1])), []
    for begin in range(0, len(rows), at_once):
        here = slice(begin, begin + at_once)
        errors = output_errors(rows[here], scales[:, here], None if zero_points is None else zero_points[:, here], qmin,
                               qmax, mean, gain, None if counts is None else counts[here])
        best.append(errors.argmin(0))
    return torch.cat(best) if best else torch.empty(0, dtype=torch.int64, device=rows.device)


_OP = register(
    "least_output_error(Tensor rows, Tensor scales, Tensor? zero_points, int qmin, int qmax, float mean, float gain) "
    "-> Tensor",
    _reference, lambda rows, *_: rows.new_empty(len(rows), dtype=torch.int64), native=True,
)


def least_output_error(
    rows: Tensor, scales: Tensor, zero_points: Tensor | None, qmin: int, qmax: int, *, mean: float, gain: float,
    counts: Tensor | None = None,
) -> Tensor:
    """Index of the first candidate of least error for each row.

    Shape: ``rows`` floating [scales, n], ``counts`` likewise or ``None``: each counts once; ``scales`` float32 and
    ``zero_points`` int32 [candidates, scales]; result int64 [scales].

    >>> least_output_error(torch.tensor([[0.5, 1.5]]), torch.tensor([[1.0], [0.5]]), None, -8, 7, mean=0.0, gain=0.0)
    tensor([1])
    """
    if counts is not None:
        return _reference(rows, scales, zero_points, qmin, qmax, mean, gain, counts)
    index: Tensor = _OP(rows, scales, zero_points, qmin, qmax, mean, gain)
    return index
