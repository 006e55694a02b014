"""Adaptive pools as operators that ONNX has: pools where lengths divide, else gathered windows, axis by axis.

Window i of n along an axis of length L is [⌊i · L / n⌋, ⌈(i + 1) · L / n⌉); L may be free. torch 2.14 writes
the windows of the example there, and has no form of maxima and 3d means where lengths do not divide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from qtk.errors import ExportError

Size: TypeAlias = int | torch.SymInt

_ATEN = torch.ops.aten
_AVG_POOLS = {2: _ATEN.avg_pool2d.default, 3: _ATEN.avg_pool3d.default}
_MAX_POOLS = {2: _ATEN.max_pool2d_with_indices.default, 3: _ATEN.max_pool3d_with_indices.default}


def adaptive_avg_pool(x: Tensor, output_size: Sequence[Size]) -> Tensor:
    """As ``aten._adaptive_avg_pool2d`` and ``3d``.

    >>> adaptive_avg_pool(torch.tensor([[[1.0, 2.0, 3.0, 4.0, 5.0]]]), [1, 2])
    tensor([[[2., 4.]]])
    """
    if (kernel := _kernel(x, output_size)) is not None:
        return _AVG_POOLS[len(kernel)](x, kernel, kernel)  # type: ignore[no-any-return]
    for axis, count in _pooled_axes(x, output_size):
        x = x.mean(axis, keepdim=True) if count == 1 else _Windows.along(x, axis, count).mean(x)
    return x


def adaptive_max_pool(x: Tensor, output_size: Sequence[Size]) -> tuple[Tensor, Tensor]:
    """As ``aten.adaptive_max_pool2d`` and ``3d``: the maxima, and the first index at which each stands.

    >>> adaptive_max_pool(torch.tensor([[[1.0, 5.0, 5.0, 4.0, 3.0]]]), [1, 2])
    (tensor([[[5., 5.]]]), tensor([[[1, 2]]]))
    """
    if (kernel := _kernel(x, output_size)) is not None:
        return _MAX_POOLS[len(kernel)](x, kernel, kernel)  # type: ignore[no-any-return]
    indices = _indices(x, len(output_size))
    for axis, count in _pooled_axes(x, output_size):
        if count == 1:
            first, x = x.argmax(axis, keepdim=True), x.amax(axis, keepdim=True)
            indices = indices.gather(axis, first)
        else:
            windows = _Windows.along(x, axis, count)
            gathered = windows.gather(x)
            first, x = gathered.argmax(axis, keepdim=True), gathered.amax(axis)
            indices = windows.gather(indices).gather(axis, first).squeeze(axis)
    return x, indices


@dataclass(frozen=True, slots=True)
class _Windows:
    """The windows along an axis.

    Shape: index: [count, longest window], the last index of a shorter window repeated; lengths: [count].
    """

    axis: int
    index: Tensor
    lengths: Tensor

    @classmethod
    def along(cls, x: Tensor, axis: int, count: int) -> _Windows:
        """Returns the windows along an axis of ``x``, counted from the last one: -1, -2 and so on."""
        length = x.shape[axis]
        ordinal = torch.arange(count, device=x.device)
        start = torch.floor_divide(ordinal * length, count)
        end = torch.floor_divide((ordinal + 1) * length + (count - 1), count)
        within = torch.arange(_longest(length, count), device=x.device)
        return cls(axis, torch.minimum(start.unsqueeze(1) + within, end.unsqueeze(1) - 1), end - start)

    def gather(self, x: Tensor) -> Tensor:
        """Returns ``x`` with [count, longest window] in place of the axis; the window is at index ``axis``."""
        gathered = x.index_select(self.axis, self.index.flatten())
        return torch.unflatten(gathered, self.axis, self.index.shape)

    def mean(self, x: Tensor) -> Tensor:
        """Returns ``x`` with the means of its windows, [count], in place of the axis."""
        others = [1] * (-self.axis - 1)
        lengths = self.lengths.reshape(-1, *others)
        is_inside = torch.arange(self.index.shape[1], device=x.device) < self.lengths.unsqueeze(1)
        inside = torch.where(is_inside.reshape(*is_inside.shape, *others), self.gather(x), 0)
        return inside.sum(self.axis) / lengths


def _longest(length: Size, count: int) -> Size:
    """The length of the longest window, or a bound where ``length`` is free."""
    if not isinstance(length, int):
        return length // count + 2
    return max(-(-(ordinal + 1) * length // count) - ordinal * length // count for ordinal in range(count))


def _kernel(x: Tensor, output_size: Sequence[Size]) -> list[int] | None:
    """The lengths of the windows, one for each axis; ``None`` if a length is free or its windows differ."""
    pairs = list(zip(x.shape[-len(output_size):], output_size, strict=True))
    if all(isinstance(length, int) and isinstance(count, int) and length % count == 0 for length, count in pairs):
        return [int(length) // int(count) for length, count in pairs]
    return None


def _pooled_axes(x: Tensor, output_size: Sequence[Size]) -> Iterator[tuple[int, int]]:
    """Yields (axis, number of windows) of the axes that are pooled, the last one first.

    Raises: ExportError if the number is free, and not the length of its axis.
    """
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # loads sympy

    for axis in range(-1, -len(output_size) - 1, -1):
        length, count = x.shape[axis], output_size[axis]
        if statically_known_true(length == count):
            continue
        if not isinstance(count, int):
            raise ExportError(
                f"an adaptive pool makes {count} values of {length} along axis {axis}, and an ONNX file holds their "
                "number fixed; give the pool a number, None for all values, or prepare the model with "
                "dynamic_shapes='batch'")
        yield axis, count


def _indices(x: Tensor, axes: int) -> Tensor:
    """The index of each value in its flattened last ``axes`` axes, of the shape of ``x``."""
    sizes = x.shape[-axes:]
    return torch.arange(math.prod(sizes), device=x.device).reshape(sizes).expand(x.shape)


ADAPTIVE_POOLS: Mapping[Callable[..., object], Callable[..., object]] = {
    torch.ops.aten._adaptive_avg_pool2d.default: adaptive_avg_pool,
    torch.ops.aten._adaptive_avg_pool3d.default: adaptive_avg_pool,
    _ATEN.adaptive_max_pool2d.default: adaptive_max_pool,
    _ATEN.adaptive_max_pool3d.default: adaptive_max_pool,
}
"""Operator → what it is decomposed into."""
