"""The numbers that the weights of a layer can become, as a matrix: every weight with the scale and zero it goes by."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qtk.core.dtypes import FloatDtype
from qtk.core.spec import QuantSpec
from qtk.ops.fake_quantize import fake_quantize
from qtk.ops.fake_quantize_float import fake_quantize_float


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """Scale and zero point of every weight.

    Shape: ``scale`` float32 and ``zero_point`` int32, or ``None``, as the weights, of any shape.
    """

    spec: QuantSpec
    scale: Tensor
    zero_point: Tensor | None = None

    def nearest(self, weight: Tensor) -> Tensor:
        """Each weight's nearest number. Shape: as ``scale``; in the dtype of ``weight``."""
        block_size = (1,) * weight.ndim
        own = weight.to(torch.float32)
        if isinstance(self.spec.dtype, FloatDtype):
            near = fake_quantize_float(own, self.scale, block_size, self.spec.dtype.name)
        else:
            near = fake_quantize(
                own, self.scale, self.zero_point, block_size, int(self.spec.qmin), int(self.spec.qmax)
            )
        return near.to(weight.dtype)

    def __getitem__(self, index: int | Tensor | tuple[slice, Tensor | int | None]) -> Grid:
        """The same of some of the weights."""
        zero = None if self.zero_point is None else self.zero_point[index].contiguous()
        return Grid(self.spec, self.scale[index].contiguous(), zero)
