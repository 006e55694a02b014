"""The batch to capture a model with, and whether the sizes of others differ in more than the number of samples."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from torch import Tensor

from qtk.torch_private import pytree

Axis = tuple[int, int]
"""The number of a tensor in a batch, and one of its axes."""


def differing_axes(batches: Iterable[object]) -> set[Axis]:
    """The axes, other than the first of each tensor, whose lengths differ between batches.

    >>> import torch
    >>> sorted(differing_axes([torch.zeros(2, 5), torch.zeros(3, 7)]))
    [(0, 1)]

    Batches of other kinds than the first, with more tensors or other axes, are not compared.
    """
    found: set[Axis] = set()
    first: list[tuple[int, ...]] | None = None
    for batch in batches:
        shapes = _shapes(batch)
        first = shapes if first is None else first
        if list(map(len, shapes)) == list(map(len, first)):
            found |= {(number, axis) for number, (one, other) in enumerate(zip(shapes, first, strict=True))
                      for axis in range(1, len(one)) if one[axis] != other[axis]}
    return found


def example_of(batches: list[object]) -> tuple[object, Literal["batch", "all"]]:
    """The batch to capture a model with, and its dynamic shapes: all, where batches differ in other sizes than axis 0.

    It is the first in which none of these sizes is 1, for ``torch.export`` takes that for a constant.

    >>> import torch
    >>> batch, dynamic_shapes = example_of([torch.zeros(2, 1), torch.zeros(2, 7)])
    >>> batch.shape, dynamic_shapes
    (torch.Size([2, 7]), 'all')
    """
    axes = differing_axes(batches)

    def is_fit(batch: object) -> bool:
        shapes = _shapes(batch)
        return all(number < len(shapes) and axis < len(shapes[number]) and shapes[number][axis] > 1
                   for number, axis in axes)

    return next(filter(is_fit, batches), batches[0]), "all" if axes else "batch"


def _shapes(batch: object) -> list[tuple[int, ...]]:
    return [tuple(leaf.shape) for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
