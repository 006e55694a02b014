"""Broadcasting of scales over the blocks of elements that share them, as views without copies.

A tensor of shape ``(8, 128)`` in blocks of ``(1, 32)`` is viewed as ``(8, 4, 32)`` and its ``(8, 4)`` scales as
``(8, 4, 1)``, which broadcast. Scales per channel, ``(8,)``, are viewed as ``(8, 1)``; per tensor they stay ``(1,)``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from qtk.core.granularity import WHOLE, Shape
from qtk.errors import SpecError

PIECE = 1 << 17
"""Elements of one piece per CPU thread: small enough to stay in its L2 cache between the passes of a formula."""


def check_fit(values: Tensor, shape: Sequence[int], block_size: Sequence[int]) -> None:
    """Checks that scales or zero points fit a tensor of ``shape``.

    Raises: SpecError if they do not.

    >>> check_fit(torch.ones(3), (8, 5), (1, -1))
    Traceback (most recent call last):
    qtk.errors.SpecError: scale or zero point of shape (3,) does not fit a tensor of shape (8, 5) in blocks of (1, -1)
    """
    if not block_size:
        fits = values.numel() == 1
    elif len(block_size) != len(shape):
        fits = False
    elif values.ndim == len(shape):
        fits = all(
            count == 1 if size == WHOLE else count * size == length
            for count, size, length in zip(values.shape, block_size, shape, strict=True)
        )
    else:  # per channel: one axis is kept
        kept = [length for size, length in zip(block_size, shape, strict=True) if size == 1]
        fits = list(values.shape) == kept and all(size in (1, WHOLE) for size in block_size)
    if not fits:
        described = f"tensor of shape {tuple(shape)}" + (f" in blocks of {tuple(block_size)}" if block_size else "")
        raise SpecError(f"scale or zero point of shape {tuple(values.shape)} does not fit a {described}")


def check_range(scale: Tensor, zero_point: Tensor | None, shape: Sequence[int], block_size: Sequence[int]) -> None:
    """Checks both with ``check_fit``. Raises: SpecError if one does not fit a tensor of ``shape``."""
    for values in (scale, zero_point):
        if values is not None:
            check_fit(values, shape, block_size)


def split_shape(shape: Sequence[int], block_size: Sequence[int]) -> tuple[Shape, Shape]:
    """``shape`` with every axis that is cut into blocks split into (blocks, inside), and the inside axes.

    >>> split_shape((8, 128), (1, 32))
    ((8, 4, 32), (2,))
    >>> split_shape((8, 3, 5), (-1, 1, -1))
    ((8, 3, 5), (0, 2))
    """
    if not block_size:
        return tuple(shape), tuple(range(len(shape)))
    split: list[int] = []
    inside: list[int] = []
    for length, size in zip(shape, block_size, strict=True):
        if size == 1:
            split.append(length)
            continue
        if size not in (WHOLE, length):
            split.append(length // size)
        inside.append(len(split))
        split.append(length if size == WHOLE else size)
    return tuple(split), tuple(inside)


def align(values: Tensor, shape: Sequence[int], block_size: Sequence[int]) -> Tensor:
    """Scales or zero points as float32, broadcastable against the tensor viewed in its split shape.

    Raises: SpecError if they do not fit.
    """
    check_fit(values, shape, block_size)
    values = values.to(torch.float32)
    if not block_size:
        return values.reshape([1] if shape else [])
    split, inside = split_shape(shape, block_size)
    return values.reshape([1 if axis in inside else length for axis, length in enumerate(split)])


def sum_blocks(values: Tensor, shape: Sequence[int], block_size: Sequence[int]) -> Tensor:
    """Sums over the elements that share a scale. Shape: ``values`` in the split shape, or a piece; result as ``align``.

    >>> sum_blocks(torch.ones(8, 4, 32), (8, 128), (1, 32)).shape
    torch.Size([8, 4, 1])
    """
    if not block_size:
        return values.sum().reshape([1] if shape else [])
    inside = split_shape(shape, block_size)[1]
    return values.sum(inside, keepdim=True) if inside else values


def flat(x: Tensor) -> Tensor | None:
    """All elements in memory order, as a view of one axis; ``None`` if the tensor is not dense in memory.

    >>> flat(torch.arange(6).reshape(2, 3).t())
    tensor([0, 1, 2, 3, 4, 5])
    >>> flat(torch.zeros(1).expand(3)) is None
    True
    """
    if x.is_contiguous():
        return x.view(-1)
    dense = x.permute(memory_order(x))
    return dense.view(-1) if dense.is_contiguous() else None


def memory_order(x: Tensor) -> list[int]:
    """The axes from the widest stride to the narrowest."""
    return sorted(range(x.ndim), key=x.stride, reverse=True)


def pieces(
    tensors: Sequence[Tensor], values: Sequence[Tensor | None], block_size: Sequence[int]
) -> Iterator[tuple[list[Tensor], list[Tensor | None]]]:
    """Cuts ``tensors`` (all of one shape) into views, each with its slice of the aligned scales or zero points.

    On the CPU a big tensor is cut into pieces that fit the cache; a small one, or one on a GPU, stays in one piece.

    Raises: SpecError if ``values`` do not fit the tensors.
    """
    first = tensors[0]
    shape = first.shape
    aligned = [None if value is None else align(value, shape, block_size) for value in values]
    if not shape:
        views = [tensor.reshape(1) for tensor in tensors]
        aligned = [None if value is None else value.reshape(1) for value in aligned]
    else:
        split = split_shape(shape, block_size)[0] if block_size else shape
        views = list(tensors) if split == shape else [tensor.view(split) for tensor in tensors]
    if first.numel() <= PIECE or first.device.type != "cpu":
        yield views, aligned
        return
    length = PIECE * torch.get_num_threads()
    order = memory_order(views[0])
    if not block_size:
        ordered = [tensor.permute(order) for tensor in views]
        if all(tensor.is_contiguous() for tensor in ordered):
            for flats in zip(*(torch.split(tensor.view(-1), length) for tensor in ordered), strict=True):
                yield list(flats), aligned
            return
    outer = next(axis for axis in order if views[0].shape[axis] > 1)
    count = max(1, length * views[0].shape[outer] // first.numel())
    for start in range(0, views[0].shape[outer], count):
        size = min(count, views[0].shape[outer] - start)
        parts = [tensor.narrow(outer, start, size) for tensor in views]
        shared = not block_size or outer in split_shape(shape, block_size)[1]
        yield parts, [value if value is None or shared else value.narrow(outer, start, size) for value in aligned]
