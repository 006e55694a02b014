"""Where the tokens of a batch are among the axes of a value, and the rows of those that count.

An axis is a product of factors, outermost first: heads folded into the batch, or tokens into rows, are axes of two.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


class Count(enum.Enum):
    """What a factor counts; keys are the tokens that queries of another axis are compared with in attention scores."""

    SAMPLES = "samples"
    TOKENS = "tokens"
    KEYS = "keys"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Factor:
    """A factor of an axis.

    Args:
        count: what it counts.
        length: its length when the model was captured.
        fixed: whether every batch has that length.
    """

    count: Count
    length: int
    fixed: bool = True

    @property
    def is_row(self) -> bool:
        """Whether it counts samples or tokens."""
        return self.count in (Count.SAMPLES, Count.TOKENS)

    @property
    def is_other(self) -> bool:
        """Whether it counts none of those that a mask tells apart."""
        return self.count is Count.OTHER


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """The factors of every axis of a value; samples, tokens and keys are each in one place.

    >>> layout = TokenLayout.of_shape((2, 5, 8))
    >>> print(layout)
    [samples, tokens, 8]
    >>> print(layout.reshaped((10, 8)), layout.reshaped((2, 5, 4, 2)), layout.reshaped((10, 4, 2)))
    [samples·tokens, 8] [samples, tokens, 4, 2] [samples·tokens, 4, 2]
    >>> print(layout.reshaped((2, 40)).reshaped((2, 5, 8)), layout.reshaped((4, 20)))
    [samples, tokens, 8] None
    """

    axes: tuple[tuple[Factor, ...], ...]

    @classmethod
    def of_shape(cls, lengths: Sequence[int], fixed: Sequence[bool] | None = None) -> TokenLayout:
        """That of a value [samples, tokens, …]."""
        counts = [Count.SAMPLES, Count.TOKENS, *[Count.OTHER] * len(lengths)]
        fixed = [True] * len(lengths) if fixed is None else fixed
        return cls(tuple((Factor(*each),) for each in zip(counts, lengths, fixed, strict=False)))

    @property
    def is_complete(self) -> bool:
        """Whether samples and tokens are both there, once."""
        counts = [factor.count.value for factors in self.axes for factor in factors if not factor.is_other]
        return sorted(counts) in (["samples", "tokens"], ["keys", "samples", "tokens"])

    def lengths(self) -> tuple[int, ...]:
        """Of the axes, when the model was captured."""
        return tuple(math.prod(factor.length for factor in factors) for factors in self.axes)

    def reshaped(self, lengths: Sequence[int]) -> TokenLayout | None:
        """The layout of the same elements in another shape; ``None`` if an axis would hold a part of the rows."""
        pending = [factor for factors in self.axes for factor in factors][::-1]
        axes = []
        for length in lengths:
            factors: list[Factor] = []
            room = length
            while room > 1 and pending:
                factor = pending.pop()
                if room % factor.length == 0:
                    factors.append(factor)
                    room //= factor.length
                elif not factor.is_other or factor.length % room:
                    return None
                else:
                    factors.append(Factor(Count.OTHER, room, factor.fixed))
                    pending.append(Factor(Count.OTHER, factor.length // room, factor.fixed))
                    room = 1
            while pending and pending[-1].length == 1 and not factors:  # an axis of one, samples included
                factors.append(pending.pop())
            axes.append(tuple(factors) or (Factor(Count.OTHER, length),))
        rest = [factor for factor in pending if not factor.is_other]
        if rest and axes:
            axes[-1] = (*axes[-1], *rest)
        return TokenLayout(tuple(axes))

    def rows(self, value: Tensor, valid: Tensor) -> Tensor | None:
        """The rows of ``value`` whose tokens are valid, of attention scores those elements whose keys are valid too.

        >>> import torch
        >>> value = torch.arange(8).reshape(2, 2, 2)
        >>> valid = torch.tensor([[True, True], [True, False]])
        >>> TokenLayout.of_shape((2, 2, 2)).rows(value, valid).tolist()
        [[[0, 1]], [[2, 3]], [[4, 5]]]

        Shape: ``value`` as the layout; ``valid`` bool [samples, tokens]. The result has as many axes as ``value``: all
        rows are along the first axis that held samples, tokens or keys, and the others of these have length 1.

        Returns: ``None`` if the lengths of ``value`` do not fit.
        """
        lengths = self._lengths_of(value, valid.shape[0], valid.shape[1])
        if lengths is None:
            return None
        flat = [(factor, axis) for axis, factors in enumerate(self.axes) for factor in factors]
        place = {factor.count: index for index, (factor, _) in enumerate(flat) if not factor.is_other}
        atoms = [length for each in lengths for length in each]
        chosen = valid if Count.KEYS not in place else valid[:, :, None] & valid[:, None]
        moved = [place[count] for count in (Count.SAMPLES, Count.TOKENS, Count.KEYS) if count in place]
        rows = value.reshape(atoms).movedim(moved, list(range(len(moved))))[chosen]  # [rows, the other factors]
        first = min(flat[index][1] for index in moved)
        others = [[n for factor, n in zip(factors, each, strict=True) if factor.is_other]
                  for factors, each in zip(self.axes, lengths, strict=True)]
        shape = [math.prod(each) for each in others]
        shape[first] *= rows.shape[0]
        return rows.movedim(0, sum(len(each) for each in others[:first])).reshape(shape)

    def samples(self, value: Tensor, begin: int, end: int, *, of: tuple[int, int]) -> Tensor | None:
        """The samples ``begin`` to ``end`` of ``value``, wherever they are among its axes.

        >>> import torch
        >>> layout = TokenLayout.of_shape((2, 3, 1)).reshaped((6, 1))
        >>> layout.samples(torch.arange(6)[:, None], 1, 2, of=(2, 3)).flatten().tolist()
        [3, 4, 5]

        Args:
            value: has this layout.
            begin: the first sample.
            end: the one after the last.
            of: how many samples and tokens the batch has.

        Returns: ``None`` if the lengths of ``value`` do not fit, or no axis has samples.
        """
        lengths = self._lengths_of(value, *of)
        counts = [factor.count for factors in self.axes for factor in factors]
        if lengths is None or Count.SAMPLES not in counts:
            return None
        place = counts.index(Count.SAMPLES)
        chosen = value.reshape([length for each in lengths for length in each]).narrow(place, begin, end - begin)
        axis = next(axis for axis, factors in enumerate(self.axes) if Count.SAMPLES in [each.count for each in factors])
        shape = [math.prod(each) for each in lengths]
        shape[axis] = shape[axis] // of[0] * (end - begin)
        return chosen.reshape(shape)

    def _lengths_of(self, value: Tensor, samples: int, tokens: int) -> list[list[int]] | None:
        """The lengths of the factors of every axis of ``value``; ``None`` if they do not fit."""
        counted = {Count.SAMPLES: samples, Count.TOKENS: tokens, Count.KEYS: tokens}
        lengths: list[list[int]] = []
        for factors, length in zip(self.axes, value.shape, strict=True):
            known = [counted.get(factor.count, factor.length if factor.fixed else -1) for factor in factors]
            unknown, product = known.count(-1), math.prod(each for each in known if each != -1)
            if unknown > 1 or product == 0 or length % product or (not unknown and product != length):
                return None
            lengths.append([length // product if each == -1 else each for each in known])
        return lengths

    def __str__(self) -> str:
        def text(factor: Factor) -> str:
            return str(factor.length) if factor.is_other else factor.count.value

        return f"[{', '.join('·'.join(map(text, factors)) for factors in self.axes)}]"
