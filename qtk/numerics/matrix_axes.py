"""Which axes of a weight count matrices, outputs and columns, where it is a stack of matrices or otherwise laid out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class MatrixAxes:
    """The axes of a weight by what they count: its matrices, the outputs and the columns (inputs) of each.

    ``stack`` rises, so that matrices are in the order of the weight's memory. A weight without ``stack`` whose outputs
    are cut (queries, keys and values in one parameter) has ``parts`` matrices, of equal numbers of outputs.

    >>> axes = MatrixAxes((0,), (2,), (1,))  # [experts, in, out]
    >>> weight = torch.arange(12).reshape(2, 2, 3)
    >>> axes.to_gemm(weight).shape
    torch.Size([2, 3, 2])
    >>> torch.equal(axes.from_gemm(axes.to_gemm(weight), weight.shape), weight)
    True
    >>> MatrixAxes((), (0,), (1,), parts=3).to_gemm(torch.zeros(48, 16)).shape
    torch.Size([3, 16, 16])
    """

    stack: tuple[int, ...]
    outputs: tuple[int, ...]
    columns: tuple[int, ...]
    parts: int = 1

    def count(self, shape: Sequence[int]) -> int:
        """How many matrices a weight of ``shape`` has."""
        return self.parts * math.prod(shape[axis] for axis in self.stack)

    def to_gemm(self, weight: Tensor) -> Tensor:
        """Shape: result [matrices, outputs, columns]."""
        outputs, columns = (math.prod(weight.shape[axis] for axis in axes) for axes in (self.outputs, self.columns))
        return weight.permute(self._order).reshape(self.count(weight.shape), outputs // self.parts, columns)

    def from_gemm(self, matrices: Tensor, shape: Sequence[int]) -> Tensor:
        """Inverse of ``to_gemm``: a weight of ``shape``."""
        order = self._order
        inverse = [order.index(axis) for axis in range(len(order))]
        return matrices.reshape([shape[axis] for axis in order]).permute(inverse).contiguous()

    def indices(self, shape: Sequence[int], device: torch.device | None = None) -> Tensor:
        """The index of the matrix that each element belongs to, without memory of its own. Shape: int64 ``shape``."""
        if self.parts > 1:
            (axis,) = self.outputs
            index = torch.arange(shape[axis], device=device) // (shape[axis] // self.parts)
            return index.reshape([-1 if each == axis else 1 for each in range(len(shape))]).expand(tuple(shape))
        lengths = [length if axis in self.stack else 1 for axis, length in enumerate(shape)]
        return torch.arange(math.prod(lengths), device=device).reshape(lengths).expand(tuple(shape))

    def matrices(self, tensor: Tensor) -> Iterator[Tensor]:
        """Views of the single matrices of a weight or its scales, in the order of ``to_gemm``, each of full rank."""
        if self.parts > 1:
            yield from tensor.chunk(self.parts, self.outputs[0])
            return
        for place in product(*(range(tensor.shape[axis]) for axis in self.stack)):
            view = tensor
            for axis, index in zip(self.stack, place, strict=True):
                view = view.narrow(axis, index, 1)
            yield view

    @property
    def separate(self) -> tuple[int, ...]:
        """The axes along which matrices lie one after the other."""
        return self.outputs if self.parts > 1 else self.stack

    @property
    def of_one(self) -> MatrixAxes:
        """The axes of one of the matrices, as ``matrices`` gives it."""
        return replace(self, parts=1)

    @property
    def _order(self) -> tuple[int, ...]:
        return (*self.stack, *self.outputs, *self.columns)
