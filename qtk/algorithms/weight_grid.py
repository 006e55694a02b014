"""The quantization grid of a layer's weights: scale and zero point of every weight."""

from __future__ import annotations

from dataclasses import dataclass
from types import EllipsisType

import torch
from torch import Tensor

from qtk.core.dtypes import FloatDtype
from qtk.core.spec import QuantSpec
from qtk.numerics import coordinate_descent, feedback_rounding
from qtk.ops.coordinate_descent import descend_
from qtk.ops.fake_quantize import fake_quantize
from qtk.ops.fake_quantize_float import fake_quantize_float
from qtk.ops.feedback_rounding import round_with_feedback_

PRUNED_SCALE = 1e30
"""The scale of a weight that stays 0: no other grid point is within reach."""

Index = int | slice | Tensor | EllipsisType | None


@dataclass(frozen=True, slots=True, eq=False)
class WeightGrid:
    """Scale and zero point of every weight, laid out like the weights.

    Shape: ``scale`` float32 and ``zero_point`` int32, or ``None``, in the shape of the weights.

    >>> from qtk.core.dtypes import dtype
    >>> grid = WeightGrid(QuantSpec(dtype("int4"), symmetric=True), torch.tensor([0.5, 0.1]))
    >>> grid.nearest(torch.tensor([0.8, 9.0]))
    tensor([1.0000, 0.7000])
    """

    spec: QuantSpec
    scale: Tensor
    zero_point: Tensor | None = None

    @property
    def is_pruned(self) -> Tensor:
        """Returns which weights stay 0. Shape: bool, as ``scale``."""
        return self.scale == PRUNED_SCALE

    def pruned(self, zeros: Tensor) -> WeightGrid:
        """The grid on which the weights of a mask stay 0. Shape: ``zeros`` bool, as ``scale``."""
        return WeightGrid(self.spec, self.scale.masked_fill(zeros, PRUNED_SCALE), self.zero_point)

    def nearest(self, weight: Tensor) -> Tensor:
        """Each weight rounded to its nearest grid point. Shape: as ``scale``; in the dtype of ``weight``."""
        block_size = (1,) * weight.ndim
        weight_f32 = weight.to(torch.float32)
        if isinstance(self.spec.dtype, FloatDtype):
            rounded = fake_quantize_float(weight_f32, self.scale, block_size, self.spec.dtype.name)
        else:
            rounded = fake_quantize(
                weight_f32, self.scale, self.zero_point, block_size, int(self.spec.qmin), int(self.spec.qmax)
            )
        return rounded.to(weight.dtype)

    def round_with_feedback_(self, target: Tensor, change: Tensor, feedback: Tensor, *, backwards: bool) -> None:
        """Rounds ``target`` as ``qtk.numerics.feedback_rounding``, column after column.

        Args:
            target: becomes the grid points.
            change: becomes its difference from the grid points, which is fed back.
            feedback: factors of the differences; of row i only what belongs to the columns before i is read.
            backwards: whether the last column is the first to be rounded.

        Shape: ``target``, ``change`` and ``scale`` [groups, outputs, columns]; ``feedback`` [groups, columns, columns].
        """
        if not isinstance(self.spec.dtype, FloatDtype):
            codes = int(self.spec.qmin), int(self.spec.qmax)
            round_with_feedback_(target, change, feedback, self.scale, self.zero_point, *codes, backwards=backwards)
            return
        grids = [self[..., column] for column in range(target.shape[2])]
        feedback_rounding.round_with_feedback_(
            target, change, feedback, lambda x, column: grids[column].nearest(x), backwards=backwards
        )

    def descend_(self, rounded: Tensor, change: Tensor, half_gradient: Tensor, gram: Tensor, step: Tensor) -> None:
        """Moves every weight once to its best grid point: ``qtk.numerics.coordinate_descent``.

        Args:
            rounded: the weights.
            change: the float weights less the rounded ones.
            half_gradient: of the output's error by the change.
            gram: matrix of the layer's input.
            step: the inverse of its diagonal, or a little less.

        Shape: as ``qtk.ops.coordinate_descent.descend_``.
        """
        if not isinstance(self.spec.dtype, FloatDtype):
            codes = int(self.spec.qmin), int(self.spec.qmax)
            descend_(rounded, change, half_gradient, gram, step, self.scale, self.zero_point, *codes)
            return
        coordinate_descent.descend_(
            rounded, change, half_gradient, gram, step,
            lambda columns, *given: self[..., columns].round_with_feedback_(*given, backwards=False),
        )

    def __getitem__(self, index: Index | tuple[Index, ...]) -> WeightGrid:
        """The grid of a selection of the weights."""
        return WeightGrid(self.spec, self.scale[index], None if self.zero_point is None else self.zero_point[index])

    def in_order(self, order: Tensor) -> WeightGrid:
        """The grid with its columns in another order. Shape: ``order`` int64 [groups, columns]."""
        index = order[:, None].expand(self.scale.shape)
        zero_point = None if self.zero_point is None else self.zero_point.gather(2, index)
        return WeightGrid(self.spec, self.scale.gather(2, index), zero_point)
