"""``qtk::round_with_feedback_``: columns rounded one after the other, each with the errors of those before.

Formula in ``qtk.numerics.feedback_rounding``; each number has a scale of its own. It carries no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qtk.numerics import feedback_rounding as reference
from qtk.ops.fake_quantize import fake_quantize
from qtk.ops.registration import nothing, register


def _reference(
    target: Tensor, change: Tensor, feedback: Tensor, scale: Tensor, zero_point: Tensor | None, qmin: int, qmax: int,
    backwards: bool,
) -> None:
    scales = scale.permute(2, 0, 1).contiguous()
    zeros = None if zero_point is None else zero_point.permute(2, 0, 1).contiguous()

    def nearest(x: Tensor, column: int) -> Tensor:
        zero = None if zeros is None else zeros[column]
        return fake_quantize(x.to(torch.float32), scales[column], zero, (1, 1), qmin, qmax)

    reference.round_with_feedback_(target, change, feedback, nearest, backwards=backwards)


def _on_gpu(target: Tensor, *given: Any) -> None:
    from qtk.kernels.gpu import feedback_rounding as kernels

    (kernels.round_with_feedback_ if target.shape[2] <= kernels.MOST_COLUMNS else _reference)(target, *given)


_OP = register(
    "round_with_feedback_(Tensor(a!) target, Tensor(b!) change, Tensor feedback, Tensor scale, Tensor? zero_point, "
    "int qmin, int qmax, bool backwards) -> ()",
    _reference, nothing, gpu=_on_gpu, native=True,
)


def round_with_feedback_(
    target: Tensor, change: Tensor, feedback: Tensor, scale: Tensor, zero_point: Tensor | None, qmin: int, qmax: int,
    *, backwards: bool,
) -> None:
    """Rounds ``target`` to its grid in place, column after column.

    Args:
        target: numbers to round; becomes their grid points.
        change: numbers; becomes their differences from the grid points, which are fed back.
        feedback: factors of the differences; of row i only what belongs to the columns before i is read.
        scale: of every number.
        zero_point: of every number; ``None``: 0.
        qmin: the least code.
        qmax: the largest one.
        backwards: whether the last column is the first to be rounded.

    Shape: ``target`` and ``change``, of one dtype and with rows without gaps, float32 ``scale`` and int32
    ``zero_point`` [groups, rows, columns]; ``feedback`` [groups, columns, columns].

    >>> target = torch.tensor([[[0.4, 0.4]]])
    >>> scale = torch.ones_like(target)
    >>> round_with_feedback_(target, target.clone(), torch.ones(1, 2, 2), scale, None, -8, 7, backwards=False)
    >>> target
    tensor([[[0., 1.]]])
    """
    _OP(target, change, feedback, scale, zero_point, qmin, qmax, backwards)
