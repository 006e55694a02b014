"""Classes of channels that must be multiplied by the same positive factor.

A *label tensor* has the shape of a value and holds, for each element, the variable that stands for the element's
factor: float64, so that every op of data movement runs on it. It has stride 0 along the axes where it does not vary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ZERO, PINNED = 0, 1
"""Variables of elements that are 0 or ±∞ whatever the factor, and of elements whose factor must be 1."""


def constant_labels(shape: Sequence[int], variable: int = PINNED) -> Tensor:
    """The same variable for every element of a value."""
    return torch.full((), float(variable), dtype=torch.float64).expand(list(shape))


def core(labels: Tensor) -> Tensor:
    """``labels`` with length 1 along the axes where it does not vary."""
    for axis, (length, stride) in enumerate(zip(labels.shape, labels.stride(), strict=True)):
        if length > 1 and stride == 0:
            labels = labels.narrow(axis, 0, 1)
    return labels


def compact(labels: Tensor) -> Tensor:
    """Equal labels, with stride 0 along every axis where they do not vary."""
    small = core(labels)
    for axis, length in enumerate(small.shape):
        if length > 1:
            first = small.narrow(axis, 0, 1)
            if bool((small == first).all()):
                small = first
    return small.contiguous().expand(labels.shape) if small.numel() else labels


class ChannelClasses:
    """Variables, and the pairs of them that are known to be equal.

    >>> classes = ChannelClasses()
    >>> a, b = classes.new(2), classes.new(2)
    >>> classes.unify(a, b)
    tensor([2., 3.], dtype=torch.float64)
    >>> classes.pin(b[1:])
    >>> classes.representatives()
    tensor([0, 1, 2, 1, 2, 1])
    """

    def __init__(self) -> None:
        self.count = 2
        self._pairs: list[Tensor] = []

    def new(self, count: int) -> Tensor:
        """Labels of ``count`` new variables."""
        self.count += count
        return torch.arange(self.count - count, self.count, dtype=torch.float64)

    def unify(self, a: Tensor, b: Tensor) -> Tensor:
        """Makes the factors of two values, which broadcast, equal element by element. Returns: labels of the result."""
        a, b = torch.broadcast_tensors(a, b)  # type: ignore[no-untyped-call]
        both = torch.broadcast_tensors(core(a), core(b))  # type: ignore[no-untyped-call]
        differ = (both[0] != both[1]) & (both[0] != ZERO) & (both[1] != ZERO)
        if bool(differ.any()):
            self._pairs.append(torch.stack([side[differ].long() for side in both]).unique(dim=1))  # type: ignore[no-untyped-call]
        if a.numel() and bool((both[0] == ZERO).any()):
            return torch.where(both[0] == ZERO, both[1], both[0]).expand(a.shape)
        return a

    def pin(self, labels: Tensor) -> None:
        """Makes the factors of a value 1."""
        small = core(labels)
        free = small[small > PINNED].long().unique()  # type: ignore[no-untyped-call]
        if len(free):
            self._pairs.append(torch.stack([free, torch.full_like(free, PINNED)]))

    def unify_along(self, labels: Tensor, axes: Sequence[int]) -> Tensor:
        """Makes the factors of a value equal along some axes. Returns: its labels, with length 1 along them."""
        if not labels.numel():
            return labels
        small = core(labels)
        if varying := [axis for axis in axes if small.shape[axis] > 1]:
            representative = small.amax(varying, keepdim=True)  # not ZERO, if there is another one
            self.unify(representative, small)
            small = representative
        shape = [1 if axis in axes else length for axis, length in enumerate(labels.shape)]
        return small.expand(shape)

    def representatives(self) -> Tensor:
        """Variable → the smallest variable of its class, int64."""
        parents = torch.arange(self.count)
        if not self._pairs:
            return parents
        self._pairs = [torch.cat(self._pairs, 1).unique(dim=1)]  # type: ignore[no-untyped-call]
        (a, b), = self._pairs
        while True:
            roots = torch.stack([parents[a], parents[b]])
            low, high = roots.amin(0), roots.amax(0)
            if torch.equal(low, high):
                return parents
            parents.scatter_reduce_(0, high, low, "amin")
            while not torch.equal(above := parents[parents], parents):
                parents = above
