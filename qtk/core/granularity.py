"""Which elements of a tensor share one scale: all of them, one slice along an axis, one row, or one block."""

from __future__ import annotations

from dataclasses import dataclass

from qtk.errors import SpecError
from qtk.public import public

Shape = tuple[int, ...]

WHOLE = -1
"""In a block size: the block spans the whole axis."""


@public
@dataclass(frozen=True, slots=True)
class PerTensor:
    """Gives the whole tensor one scale.

    >>> PerTensor().qparam_shape((8, 16))
    (1,)
    """

    def block_size(self, rank: int) -> Shape:
        """Elements sharing a scale along each axis; empty: all elements, whatever the rank."""
        return ()

    def qparam_shape(self, shape: Shape) -> Shape:
        """Shape of the scale of a tensor of ``shape``."""
        return (1,)

    def __str__(self) -> str:
        return "per_tensor"


@public
@dataclass(frozen=True, slots=True)
class PerChannel:
    """Gives every index along ``axis`` (the axis kept) a scale; negative axes count from the end.

    >>> PerChannel(0).qparam_shape((8, 3, 5, 5))
    (8,)
    >>> PerChannel(-1).block_size(rank=3)
    (-1, -1, 1)
    """

    axis: int

    def block_size(self, rank: int) -> Shape:
        axis = self.axis_of(rank)
        return tuple(1 if i == axis else WHOLE for i in range(rank))

    def qparam_shape(self, shape: Shape) -> Shape:
        return (shape[self.axis_of(len(shape))],)

    def axis_of(self, rank: int) -> int:
        """The axis counted from the front. Raises: SpecError if a tensor of ``rank`` has no such axis."""
        if not -rank <= self.axis < rank:
            raise SpecError(f"axis {self.axis} does not exist in a tensor of rank {rank}; use {-rank} to {rank - 1}")
        return self.axis % rank

    def __str__(self) -> str:
        return f"per_channel(axis={self.axis})"


@public
@dataclass(frozen=True, slots=True)
class PerBlock:
    """Gives every block a scale; ``sizes`` has one entry an axis, -1 for the whole axis.

    >>> PerBlock((1, 32)).qparam_shape((8, 128))
    (8, 4)
    >>> PerBlock((1, 5)).qparam_shape((8, 16))
    Traceback (most recent call last):
    qtk.errors.SpecError: block_size 5 does not divide axis 1 of shape (8, 16); use a divisor of 16
    """

    sizes: Shape

    def __post_init__(self) -> None:
        if not self.sizes or any(size < 1 and size != WHOLE for size in self.sizes):
            raise SpecError(f"block sizes must be positive, or -1 for a whole axis, one an axis; got {self.sizes}")

    def block_size(self, rank: int) -> Shape:
        if rank != len(self.sizes):
            raise SpecError(f"block sizes {self.sizes} describe a tensor of rank {len(self.sizes)}, got rank {rank}")
        return self.sizes

    def qparam_shape(self, shape: Shape) -> Shape:
        counts = []
        for axis, (length, size) in enumerate(zip(shape, self.block_size(len(shape)), strict=True)):
            size = length if size == WHOLE else size
            if size == 0 or length % size:
                raise SpecError(
                    f"block_size {size} does not divide axis {axis} of shape {shape}; use a divisor of {length}"
                )
            counts.append(length // size)
        return tuple(counts)

    def __str__(self) -> str:
        return f"per_block{self.sizes}"


@public
@dataclass(frozen=True, slots=True)
class PerToken:
    """Gives every row of the last axis a scale, however many there are; for dynamic quantization.

    >>> PerToken().qparam_shape((8, 197, 384))
    (8, 197, 1)
    """

    def block_size(self, rank: int) -> Shape:
        return (*(1 for _ in range(rank - 1)), WHOLE) if rank else ()

    def qparam_shape(self, shape: Shape) -> Shape:
        return (*shape[:-1], 1)

    def __str__(self) -> str:
        return "per_token"


@dataclass(frozen=True, slots=True)
class PerTokenBlock:
    """One scale, found at run time, for every block of ``length`` along ``axis``, counted from the end: activations.

    A calibrated scale is one for the whole tensor; the last block of an axis may be shorter.

    >>> PerTokenBlock(16, -1).sizes(rank=3), PerTokenBlock(16, -1).qparam_shape((8, 197, 384))
    ((1, 1, 16), (1,))
    """

    length: int
    axis: int

    def __post_init__(self) -> None:
        if self.length < 1 or self.axis >= 0:
            raise SpecError(f"blocks have a length of at least 1 along an axis below 0, counted from the end; got "
                            f"length {self.length}, axis {self.axis}")

    def sizes(self, rank: int) -> Shape:
        """Elements of a block along each axis. Raises: SpecError if a tensor of ``rank`` has no such axis."""
        if self.axis < -rank:
            raise SpecError(f"axis {self.axis} does not exist in a tensor of rank {rank}; use {-rank} to -1")
        return tuple(self.length if axis == rank + self.axis else 1 for axis in range(rank))

    def block_size(self, rank: int) -> Shape:
        """That of the calibrated scale: all elements."""
        return ()

    def qparam_shape(self, shape: Shape) -> Shape:
        return (1,)

    def __str__(self) -> str:
        return f"per_token_block({self.length}, axis={self.axis})"


Granularity = PerTensor | PerChannel | PerToken | PerBlock | PerTokenBlock
