"""Sequential MSE on second moments: the scale with the least error of a layer's output, at a cost free of samples.

For the weights w of one output and a candidate's ŵ, with ``d = w - ŵ`` (``qtk.observers.second_moments``), the error is

    constant + 2 linear·d + dᵀ H d        linear = wᵀ E, constant = wᵀ D w

A search over n candidates forms no output. By default the candidates are ordered by the diagonal of H alone, which is
one pass over the weights, and the best of them and its neighbours decided exactly, on to a neighbour while one is
better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qtk.numerics.statistics import count_scales
from qtk.ops.candidate_errors import candidate_errors
from qtk.ops.fake_quantize import fake_quantize


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of a layer as a matrix, and what is known of its input.

    Shape: ``weight`` [groups, outputs, columns]; ``gram`` H, [groups, blocks, block, block], with ``blocks`` times
    ``block`` columns: one block for all, or one for each scale along the columns; ``linear`` [groups, outputs, columns]
    or ``None`` for 0; all of one floating dtype, in which the errors are computed.
    """

    weight: Tensor
    gram: Tensor
    linear: Tensor | None = None

    def errors(self, change: Tensor) -> Tensor:
        """``2 linear·d + dᵀ H d``, block by block.

        Shape: ``change`` d, as ``weight``; result [groups, outputs, blocks].
        """
        groups, blocks, block, _ = self.gram.shape
        shape = groups, -1, blocks, block
        parts = change.reshape(shape)
        slope = (parts.transpose(1, 2) @ self.gram).transpose(1, 2)
        if self.linear is not None:
            slope = slope + 2 * self.linear.reshape(shape)
        return (slope * parts).sum(-1)


@dataclass(frozen=True, slots=True)
class Choice:
    """The candidate taken for each scale, and its error without the constant. Shape: [scales]."""

    candidate: Tensor
    error: Tensor


def seq_mse(
    layer: Layer,
    scales: Tensor,
    zero_points: Tensor | None,
    block_size: Sequence[int],
    qmin: int,
    qmax: int,
    *,
    exact: bool = False,
) -> Choice:
    """The best of the candidates for each scale; a scale of several outputs is decided by the sum of their errors.

    Args:
        layer: weights and moments.
        scales: candidates, in the order of their size.
        zero_points: theirs.
        block_size: which elements of ``weight`` as [groups · outputs, columns] share a scale.
        qmin: least code.
        qmax: largest code.
        exact: decide every candidate exactly.

    Shape: ``scales`` and ``zero_points`` [candidates, scales], as ``qtk.ops.candidate_errors``.

    Raises: SpecError if the scales do not fit the weight.
    """
    search = _Search(layer, scales, zero_points, block_size, qmin, qmax)
    return search.all() if exact else search.screened()


@dataclass(frozen=True, slots=True)
class _Search:
    layer: Layer
    scales: Tensor
    zero_points: Tensor | None
    block_size: Sequence[int]
    qmin: int
    qmax: int

    def all(self) -> Choice:
        candidates, count = self.scales.shape
        errors = torch.stack([self.error(self._same(candidate, count)) for candidate in range(candidates)])
        best = errors.argmin(0)
        return Choice(best, errors.gather(0, best[None])[0])

    def screened(self) -> Choice:
        """Downhill from the best by the diagonal; equal neighbours are not better."""
        weight = self.layer.weight.flatten(0, 1)
        diagonal = self.layer.gram.diagonal(dim1=-2, dim2=-1).flatten(1)  # [groups, columns]
        importance = diagonal.repeat_interleave(self.layer.weight.shape[1], 0)
        rough = candidate_errors(
            weight, self.scales, self.zero_points, self.block_size, self.qmin, self.qmax, importance=importance
        )
        last = len(self.scales) - 1
        best = rough.argmin(0)
        least = self.error(best)
        for step in (-1, 1):
            moving = torch.ones_like(best, dtype=torch.bool)
            while bool(moving.any()):
                next = (best + step * moving).clamp(0, last)
                error = self.error(next)
                moving &= error < least
                best, least = torch.where(moving, next, best), torch.where(moving, error, least)
        return Choice(best, least)

    def error(self, chosen: Tensor) -> Tensor:
        """Exact errors with a candidate for each scale. Shape: ``chosen`` [scales]; alike."""
        weight = self.layer.weight.flatten(0, 1)
        shape = _scale_shape(weight.shape, self.block_size)
        scale = self.scales.gather(0, chosen[None])[0].reshape(shape)
        zero = None if self.zero_points is None else self.zero_points.gather(0, chosen[None])[0].reshape(shape)
        rounded = fake_quantize(weight, scale, zero, self.block_size, self.qmin, self.qmax)
        errors = self.layer.errors((weight - rounded).reshape(self.layer.weight.shape))  # [groups, outputs, blocks]
        count = count_scales(weight.shape, self.block_size)
        return errors.reshape(count, -1).sum(1)

    def _same(self, candidate: int, count: int) -> Tensor:
        return torch.full((count,), candidate, dtype=torch.int64, device=self.scales.device)


def _scale_shape(shape: Sequence[int], block_size: Sequence[int]) -> tuple[int, ...]:
    if not block_size:
        return (1,)
    return tuple(1 if size == -1 else length // size for length, size in zip(shape, block_size, strict=True))
