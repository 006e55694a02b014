"""Convolutions as matrix products: which inputs meet which weights.

A convolution is ``[groups, rows, inside] @ [groups, inside, outputs / groups]``: a row for every output position of
every sample, and inside it the input channels of a group times the places of the kernel. A transposed convolution is
the convolution of its input, stretched by its stride with zeros between, with the kernel turned around.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a convolution moves over its input; one number an axis of space, none for a linear layer.

    ``transposed`` of a linear layer: its weight is [in, out].

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

    @classmethod
    def linear(cls) -> Geometry:
        return cls((), (), (), ())

    @property
    def places(self) -> int:
        """Places of the kernel."""
        return math.prod(self.kernel)


def rows_of(x: Tensor, geometry: Geometry) -> Tensor:
    """What the weights of a layer are multiplied with.

    Shape: ``x`` [..., in], or [N, in, *space] or [in, *space] for a convolution; result [groups, rows,
    in / groups · places].
    """
    if not geometry.kernel:
        return x.reshape(1, -1, x.shape[-1])
    space = len(geometry.kernel)
    x = x if x.ndim == space + 2 else x[None]
    if geometry.transposed:
        x = _stretched(x, geometry)
        stride: Sequence[int] = (1,) * space
    else:
        x = functional.pad(x, [pad for pad in reversed(geometry.padding) for _ in range(2)])
        stride = geometry.stride
    for axis in range(space):
        reach = geometry.dilation[axis] * (geometry.kernel[axis] - 1) + 1
        x = x.unfold(2 + axis, reach, stride[axis])[..., :: geometry.dilation[axis]]
    samples, channels = x.shape[:2]
    out = x.shape[2 : 2 + space]
    x = x.reshape(samples, geometry.groups, channels // geometry.groups, math.prod(out), geometry.places)
    return x.permute(1, 0, 3, 2, 4).reshape(geometry.groups, samples * math.prod(out), -1)


def matrix_of(weight: Tensor, geometry: Geometry) -> Tensor:
    """The weight that ``rows_of`` is multiplied with, as a view where it can be one.

    Shape: ``weight`` [out, in / groups, *kernel], transposed [in, out / groups, *kernel]; result [groups,
    out / groups, in / groups · places].
    """
    groups = geometry.groups
    if not geometry.transposed:
        return weight.reshape(groups, weight.shape[0] // groups, -1)
    split = weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], geometry.places)
    return split.flip(-1).permute(0, 2, 1, 3).reshape(groups, weight.shape[1], -1)


def weight_of(matrix: Tensor, geometry: Geometry, shape: Sequence[int]) -> Tensor:
    """Inverse of ``matrix_of``: a weight of ``shape``."""
    if not geometry.transposed:
        return matrix.reshape(tuple(shape))
    groups, outputs, _ = matrix.shape
    split = matrix.reshape(groups, outputs, -1, geometry.places).permute(0, 2, 1, 3).flip(-1)
    return split.reshape(tuple(shape))


def _stretched(x: Tensor, geometry: Geometry) -> Tensor:
    """Zeros between the elements, and as many around as the turned kernel needs."""
    space = len(geometry.kernel)
    sizes = [(length - 1) * step + 1 for length, step in zip(x.shape[2:], geometry.stride, strict=True)]
    wide = x.new_zeros((*x.shape[:2], *sizes))
    view = wide
    for axis, step in enumerate(geometry.stride):
        view = view[(slice(None),) * (2 + axis) + (slice(None, None, step),)]
    view.copy_(x)
    extra = geometry.output_padding or (0,) * space
    around: list[int] = []
    for axis in reversed(range(space)):
        before = geometry.dilation[axis] * (geometry.kernel[axis] - 1) - geometry.padding[axis]
        around += [before, before + extra[axis]]
    return functional.pad(wide, around)
