"""Which axes of a weight count matrices, outputs and columns, where it is a stack of matrices or otherwise laid out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class MatrixAxes:
    """The axes of a weight by what they count: its matrices, the outputs and the columns (inputs) of each.

    ``stack`` rises, so that matrices are in the order of the weight's memory.

    >>> axes = MatrixAxes((0,), (2,), (1,))  # [experts, in, out]
    >>> weight = torch.arange(12).reshape(2, 2, 3)
    >>> axes.to_gemm(weight).shape
    torch.Size([2, 3, 2])
    >>> torch.equal(axes.from_gemm(axes.to_gemm(weight), weight.shape), weight)
    True
    """

    stack: tuple[int, ...]
    outputs: tuple[int, ...]
    columns: tuple[int, ...]

    def count(self, shape: Sequence[int]) -> int:
        """How many matrices a weight of ``shape`` has."""
        return math.prod(shape[axis] for axis in self.stack)

    def to_gemm(self, weight: Tensor) -> Tensor:
        """Shape: result [matrices, outputs, columns]."""
        lengths = [math.prod(weight.shape[axis] for axis in axes) for axes in (self.stack, self.outputs, self.columns)]
        return weight.permute(self._order).reshape(lengths)

    def from_gemm(self, matrices: Tensor, shape: Sequence[int]) -> Tensor:
        """Inverse of ``to_gemm``: a weight of ``shape``."""
        order = self._order
        inverse = [order.index(axis) for axis in range(len(order))]
        return matrices.reshape([shape[axis] for axis in order]).permute(inverse).contiguous()

    def indices(self, shape: Sequence[int], device: torch.device | None = None) -> Tensor:
        """The index of the matrix that each element belongs to, without memory of its own. Shape: int64 ``shape``."""
        lengths = [length if axis in self.stack else 1 for axis, length in enumerate(shape)]
        return torch.arange(math.prod(lengths), device=device).reshape(lengths).expand(tuple(shape))

    def matrices(self, tensor: Tensor) -> Iterator[Tensor]:
        """Views of the single matrices of a weight or its scales, in the order of ``to_gemm``, each of full rank."""
        for place in product(*(range(tensor.shape[axis]) for axis in self.stack)):
            view = tensor
            for axis, index in zip(self.stack, place, strict=True):
                view = view.narrow(axis, index, 1)
            yield view

    @property
    def _order(self) -> tuple[int, ...]:
        return (*self.stack, *self.outputs, *self.columns)
