"""``qtk::descend_``: a pass of coordinate descent on the rounding of a weight.

Formula in ``qtk.numerics.coordinate_descent``; each weight has a scale of its own. It carries no gradient.
"""

from __future__ import annotations

from torch import Tensor

from qtk.numerics import coordinate_descent as reference
from qtk.ops.feedback_rounding import round_with_feedback_
from qtk.ops.registration import nothing, register


def _reference(
    rounded: Tensor, change: Tensor, half_gradient: Tensor, gram: Tensor, step: Tensor, scale: Tensor,
    zero_point: Tensor | None, qmin: int, qmax: int,
) -> None:
    def round_columns(columns: slice, target: Tensor, moves: Tensor, feedback: Tensor) -> None:
        zero = None if zero_point is None else zero_point[..., columns]
        round_with_feedback_(target, moves, feedback, scale[..., columns], zero, qmin, qmax, backwards=False)

    reference.descend_(rounded, change, half_gradient, gram, step, round_columns)


_OP = register(
    "descend_(Tensor(a!) rounded, Tensor(b!) change, Tensor(c!) half_gradient, Tensor gram, Tensor step, Tensor scale, "
    "Tensor? zero_point, int qmin, int qmax) -> ()",
    _reference, nothing, native=True,
)


def descend_(
    rounded: Tensor, change: Tensor, half_gradient: Tensor, gram: Tensor, step: Tensor, scale: Tensor,
    zero_point: Tensor | None, qmin: int, qmax: int,
) -> None:
    """Moves every weight once to its best grid point, in place, column after column.

    Args:
        rounded: the weights.
        change: the float weights less the rounded ones.
        half_gradient: of the output's error by the change.
        gram: matrix of the layer's input, the second derivative of half the error.
        step: the inverse of its diagonal, or a little less.
        scale: of every weight.
        zero_point: of every weight; ``None``: 0.
        qmin: the least code.
        qmax: the largest one.

    Shape: ``rounded``, ``change`` and ``half_gradient``, of one dtype and without gaps, float32 ``scale`` and int32
    ``zero_point`` [groups, outputs, columns]; ``gram`` [groups, columns, columns] and ``step`` [groups, columns] in the
    same dtype.

    >>> import torch
    >>> weight, rounded, ones = torch.tensor([[[0.4, 0.4]]]), torch.zeros(1, 1, 2), torch.ones(1, 1, 2)
    >>> gram = torch.tensor([[[1.0, 0.9], [0.9, 1.0]]])
    >>> descend_(rounded, weight - rounded, weight @ gram, gram, torch.ones(1, 2), ones, None, -8, 7)
    >>> rounded
    tensor([[[1., 0.]]])
    """
    _OP(rounded, change, half_gradient, gram, step, scale, zero_point, qmin, qmax)
