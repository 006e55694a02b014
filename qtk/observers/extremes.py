"""Minimum and maximum of one tensor for each scale, without attention-mask sentinels."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from qtk.core.encoding import HOST, moved
from qtk.core.granularity import Granularity
from qtk.errors import CalibrationError
from qtk.ops.extremes import add_extremes_
from qtk.ops.statistics import min_max

ADVICE = "clean the data, or find the layer that produces them"

SENTINEL = -1e30
"""Values ≤ this (−inf, ``finfo.min``) mark masked attention scores; they enter no statistics."""

LEAST_MASKED = 1 / 64
"""Share of a tensor's elements from which on sentinels are a mask wherever they are, and not numbers gone wrong."""

FINITE_MASK = -1e3
"""Where an attention mask can be, values ≤ this are looked at: numbers of a mask, or large activations."""

FAR = 16
"""A mask's numbers are this many times beyond all others, and none of them is four times nearer to 0 than another."""

LEAST_FINITE = 1 / 1024
"""Share of a tensor's elements from which on such numbers are a mask; large activations are fewer."""


@dataclass(frozen=True, slots=True)
class Extremes:
    """Minimum and maximum of one tensor for each scale, and how many elements were counted.

    ``count`` elements were counted, ``sentinels`` skipped. Where ``seen`` is false a scale has only sentinels, and its
    ``low`` and ``high`` are meaningless; ``seen`` is ``None`` if every scale has a value. On an accelerator the counts
    stay tensors, and ``broken`` is not 0 if the tensor held NaN, +inf, or sentinels that are no mask.

    Shape: ``low``, ``high`` float32, ``seen`` bool, in the qparam shape.
    """

    low: Tensor
    high: Tensor
    count: int | Tensor
    sentinels: int | Tensor
    seen: Tensor | None = None
    broken: Tensor | None = None

    @property
    def nothing(self) -> bool:
        """Says whether all elements are sentinels; false where that is not known without a synchronization."""
        return isinstance(self.count, int) and self.count == 0


@dataclass(frozen=True, slots=True, eq=False)
class Running:
    """Extremes of all tensors that were added, on an accelerator: one launch a tensor, and nothing is waited for.

    A scale that has only sentinels has inf and -inf. ``counts``: elements, sentinels, tensors that are broken.

    Shape: ``low``, ``high`` float32 in the qparam shape; ``counts`` int64 [3].
    """

    low: Tensor
    high: Tensor
    counts: Tensor

    @classmethod
    def empty(cls, x: Tensor, granularity: Granularity) -> Running:
        """Of no tensor yet, for such as ``x``."""
        low = x.new_full(granularity.qparam_shape(tuple(x.shape)), torch.inf, dtype=torch.float32)
        return cls(low, torch.full_like(low, -torch.inf), torch.zeros(3, dtype=torch.int64, device=low.device))

    @property
    def extremes(self) -> Extremes:
        """The extremes over all tensors added so far."""
        count, sentinels, broken = self.counts.unbind()
        return Extremes(self.low, self.high, count, sentinels, self.low != torch.inf, broken)

    def add(self, x: Tensor, granularity: Granularity, *, allows_mask: bool) -> None:
        """Adds a tensor that has elements. Raises: SpecError if the granularity does not fit it."""
        add_extremes_(
            x, granularity.block_size(x.ndim), sentinel_bound(x.dtype), _least(x, allows_mask=allows_mask),
            self.low.view(-1), self.high.view(-1), self.counts,
        )


def _least(x: Tensor, *, allows_mask: bool) -> int:
    """Sentinels from which on they are a mask."""
    return 0 if allows_mask else math.ceil(LEAST_MASKED * x.numel())


class Counted:
    """Base of the observers: counts elements and sentinels; on an accelerator the counts are read only on demand.

    Attributes:
        allows_mask: whether few sentinels are a mask too; otherwise they are refused like NaN.
        finds_mask: whether finite numbers may be a mask too, see ``with_infinite_mask``.
    """

    def __init__(self) -> None:
        self.allows_mask = True
        self.finds_mask = False
        self._count: int | Tensor = 0
        self._sentinels: int | Tensor = 0
        self._broken: Tensor | None = None

    @property
    def count(self) -> int:
        """Elements that entered the statistics."""
        return int(self._count)

    @property
    def sentinels(self) -> int:
        """Elements left out as attention-mask sentinels."""
        return int(self._sentinels)

    def check(self) -> None:
        """Raises: CalibrationError if NaN or infinity was observed on an accelerator."""
        if self._broken is not None and bool(self._broken):
            raise CalibrationError(f"NaN or infinity among the {self.count} elements seen; {ADVICE}")

    def _add(self, batch: Extremes) -> None:
        self._join(batch.count, batch.sentinels, batch.broken)

    def _add_all(self, other: Counted) -> None:
        self._join(other._count, other._sentinels, other._broken)

    def _join(self, count: int | Tensor, sentinels: int | Tensor, broken: Tensor | None) -> None:
        self._count = _on_one(self._count, count) + count
        self._sentinels = _on_one(self._sentinels, sentinels) + sentinels
        if broken is not None:
            self._broken = broken if self._broken is None else self._broken.to(broken.device) | broken


def settle(observers: Iterable[object]) -> None:
    """Reads the counts of all observers among ``observers`` from an accelerator together."""
    counted = [each for each in observers if isinstance(each, Counted)]
    known = [(each._count, each._sentinels, False if each._broken is None else each._broken) for each in counted]
    read = moved([torch.as_tensor(number) for each in known for number in each], HOST)
    for number, observer in enumerate(counted):
        count, sentinels, broken = read[3 * number : 3 * number + 3]
        observer._count, observer._sentinels = int(count), int(sentinels)
        observer._broken = None if observer._broken is None else broken


def _on_one(value: int | Tensor, other: int | Tensor) -> int | Tensor:
    both = isinstance(value, Tensor) and isinstance(other, Tensor)
    return value.to(other.device) if both else value  # type: ignore[union-attr]


def sentinel_bound(dtype: torch.dtype) -> float:
    """Values ≤ this are sentinels; in float16, which cannot hold −1e30, its smallest number.

    >>> sentinel_bound(torch.float32), sentinel_bound(torch.float16)
    (-1e+30, -65504.0)
    """
    return max(SENTINEL, torch.finfo(dtype).min)


def extremes(
    x: Tensor, granularity: Granularity, *, allows_mask: bool = True, finds_mask: bool = False,
    known: tuple[Tensor, Tensor] | None = None,
) -> Extremes | None:
    """Minimum and maximum of ``x`` for each scale, ``None`` if ``x`` is empty.

    Args:
        x: the tensor.
        granularity: which elements share a scale.
        allows_mask: whether few sentinels are a mask too.
        finds_mask: whether the finite numbers of a mask are sentinels too, as ``with_infinite_mask`` finds them.
        known: the results of ``min_max`` on a tensor on the CPU, if a pass over it has found them.

    Raises: CalibrationError if ``x`` is on the CPU and holds NaN, +inf, or sentinels that are no mask, with the index
        of the first; SpecError if the granularity does not fit it.
    """
    if x.numel() == 0:
        return None
    bound = sentinel_bound(x.dtype)
    if not on_cpu(x):
        running = Running.empty(x, granularity)
        running.add(with_infinite_mask(x) if finds_mask else x, granularity, allows_mask=allows_mask)
        return running.extremes
    low, high = _reduce(x, granularity, known)
    if finds_mask and bool((low <= FINITE_MASK).any()):
        x = with_infinite_mask(x)
        low, high = _reduce(x, granularity)
    if bool(((low > bound) & (high < torch.inf)).all()):  # false at NaN too
        return Extremes(low, high, x.numel(), 0)
    counts = {"NaN": int(x.isnan().sum()), "+inf": int(x.isposinf().sum())}
    broken = [f"{count} {kind}" for kind, count in counts.items() if count]
    if broken:
        raise CalibrationError(
            f"{' and '.join(broken)} among the {x.numel()} elements of a {x.dtype} tensor of shape {tuple(x.shape)}; "
            f"{ADVICE}"
        )
    masked = x <= bound
    sentinels = int(masked.sum())
    if not allows_mask and sentinels < LEAST_MASKED * x.numel():
        index = masked.nonzero()[0].tolist()
        raise CalibrationError(
            f"{float(x[tuple(index)]):.3g} at index {index}, one of {sentinels} values ≤ {bound:.3g} among the "
            f"{x.numel()} elements of a {x.dtype} tensor of shape {tuple(x.shape)} that carries no attention mask; "
            f"{ADVICE}"
        )
    low, _ = _reduce(x.masked_fill(masked, torch.inf), granularity)
    seen = low < torch.inf
    return Extremes(low, high, x.numel() - sentinels, sentinels, None if bool(seen.all()) else seen)


def with_infinite_mask(x: Tensor) -> Tensor:
    """``x`` with −inf in place of the finite numbers of an attention mask, as -1e4 or -1e9, where it holds such.

    They are far below all others, and between them and the others there is nothing. What is 0 elsewhere is the mask
    itself, which codes hold.

    >>> with_infinite_mask(torch.tensor([1.5, -2.0, -1e4, 0.5 - 1e4]))
    tensor([ 1.5000, -2.0000,    -inf,    -inf])
    """
    if x.numel() == 0:
        return x
    low = x.amin()
    is_masked = x <= low / FAR
    is_mask = (low <= FINITE_MASK) & (x.amax() <= -low / FAR) & ~(is_masked & (x > low / (FAR / 4))).any()
    is_mask &= (is_masked.sum() >= LEAST_FINITE * x.numel()) & (~is_masked & (x != 0)).any()
    return x.masked_fill(is_masked & is_mask, -torch.inf)


def on_cpu(x: Tensor) -> bool:
    """Says whether values of ``x`` can be read without synchronizing with an accelerator."""
    return x.device.type == "cpu"


def _reduce(
    x: Tensor, granularity: Granularity, known: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Minimum and maximum, float32 in the qparam shape; NaN wins in both."""
    shape = granularity.qparam_shape(tuple(x.shape))
    low, high = min_max(x, granularity.block_size(x.ndim)) if known is None else known
    return low.reshape(shape), high.reshape(shape)
