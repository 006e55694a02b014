"""Layers as matrix products: im2col of the input, and the weight in GEMM layout.

A convolution is ``[groups, rows, columns] @ [groups, columns, outputs / groups]``: a row for every output position of
every sample, and a column for every input channel of a group at every position of the kernel. A transposed convolution
is the convolution of its input, with ``stride - 1`` zeros between the elements, with the flipped kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from qtk.numerics.matrix_axes import MatrixAxes


@dataclass(frozen=True, slots=True)
class Geometry:
    """The geometry of a convolution: one number for each spatial axis; a linear layer has none.

    ``transposed`` of a linear layer: its weight is [in, out]. ``axes``: of a weight that is laid out otherwise, or is a
    stack of ``groups`` matrices, each with rows of its own.

    >>> Geometry.linear().groups
    1
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    transposed: bool = False
    output_padding: tuple[int, ...] = ()
    axes: MatrixAxes | None = None

    @classmethod
    def of_matrices(cls, axes: MatrixAxes, shape: Sequence[int]) -> Geometry:
        """That of products with the matrices of a weight of ``shape``."""
        return cls((), (), (), (), axes.count(shape), axes=axes)

    @classmethod
    def linear(cls) -> Geometry:
        return cls((), (), (), ())

    @property
    def kernel_positions(self) -> int:
        """Spatial positions of the kernel."""
        return math.prod(self.kernel)

    @property
    def is_pointwise(self) -> bool:
        """Whether every output position reads the same position of the input alone."""
        return {*self.kernel, *self.stride} <= {1} and not any(self.padding)


def im2col(x: Tensor, geometry: Geometry) -> Tensor:
    """The input of a layer as the matrix that its weight is multiplied with.

    Shape: ``x`` [..., in], or [N, in, *space] or [in, *space] for a convolution; result [groups, rows,
    in / groups · kernel positions].

    >>> import torch
    >>> im2col(torch.tensor([[[1.0, 2.0, 3.0]]]), Geometry((2,), (1,), (0,), (1,)))
    tensor([[[1., 2.],
             [2., 3.]]])
    """
    if not geometry.kernel:
        return x.reshape(1, -1, x.shape[-1])
    space = len(geometry.kernel)
    x = x if x.ndim == space + 2 else x[None]
    if geometry.transposed:
        x = _with_zeros_between(x, geometry)
        stride: Sequence[int] = (1,) * space
    else:
        x = functional.pad(x, [pad for pad in reversed(geometry.padding) for _ in range(2)])
        stride = geometry.stride
    for axis in range(space):
        extent = geometry.dilation[axis] * (geometry.kernel[axis] - 1) + 1
        x = x.unfold(2 + axis, extent, stride[axis])[..., :: geometry.dilation[axis]]
    samples, channels = x.shape[:2]
    out = x.shape[2 : 2 + space]
    x = x.reshape(samples, geometry.groups, channels // geometry.groups, math.prod(out), geometry.kernel_positions)
    return x.permute(1, 0, 3, 2, 4).reshape(geometry.groups, samples * math.prod(out), -1)


def weight_to_gemm(weight: Tensor, geometry: Geometry) -> Tensor:
    """A weight in GEMM layout, a view where it can be one: the output is ``im2col(x) @ matrix.mT``.

    Shape: ``weight`` [out, in / groups, *kernel], transposed [in, out / groups, *kernel]; result [groups,
    out / groups, in / groups · kernel positions].
    """
    groups = geometry.groups
    if geometry.axes is not None:
        return geometry.axes.to_gemm(weight)
    if not geometry.transposed:
        return weight.reshape(groups, weight.shape[0] // groups, -1)
    split = weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], geometry.kernel_positions)
    return split.flip(-1).permute(0, 2, 1, 3).reshape(groups, weight.shape[1], -1)


def gemm_to_weight(matrix: Tensor, geometry: Geometry, shape: Sequence[int]) -> Tensor:
    """Inverse of ``weight_to_gemm``: a weight of ``shape``."""
    if geometry.axes is not None:
        return geometry.axes.from_gemm(matrix, shape)
    if not geometry.transposed:
        return matrix.reshape(tuple(shape))
    groups, outputs, _ = matrix.shape
    split = matrix.reshape(groups, outputs, -1, geometry.kernel_positions).permute(0, 2, 1, 3).flip(-1)
    return split.reshape(tuple(shape))


def _with_zeros_between(x: Tensor, geometry: Geometry) -> Tensor:
    """``stride - 1`` zeros between the elements, and as many around as the flipped kernel needs."""
    space = len(geometry.kernel)
    sizes = [(length - 1) * stride + 1 for length, stride in zip(x.shape[2:], geometry.stride, strict=True)]
    stretched = x.new_zeros((*x.shape[:2], *sizes))
    view = stretched
    for axis, stride in enumerate(geometry.stride):
        view = view[(slice(None),) * (2 + axis) + (slice(None, None, stride),)]
    view.copy_(x)
    output_padding = geometry.output_padding or (0,) * space
    padding: list[int] = []
    for axis in reversed(range(space)):
        before = geometry.dilation[axis] * (geometry.kernel[axis] - 1) - geometry.padding[axis]
        padding += [before, before + output_padding[axis]]
    return functional.pad(stretched, padding)
