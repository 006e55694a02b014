"""Sequential MSE on second moments: the scale with the least error of a layer's output, at a cost free of samples.

For the weights w of one output and a candidate's ŵ, with ``d = w - ŵ`` (``qtk.observers.second_moments``), the error is

    constant + 2 linear·d + dᵀ H d        linear = wᵀ E, constant = wᵀ D w

so that a search over many candidates forms no output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qtk.core.granularity import WHOLE
from qtk.errors import SpecError
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
    layer: Layer, scales: Tensor, zero_points: Tensor | None, block_size: Sequence[int], qmin: int, qmax: int
) -> Choice:
    """The best of the candidates for each scale; a scale of several outputs is decided by the sum of their errors.

    The first of equal ones wins.

    Args:
        layer: weights and moments.
        scales: candidates.
        zero_points: theirs.
        block_size: which elements of ``weight`` as [groups · outputs, columns] share a scale.
        qmin: least code.
        qmax: largest code.

    Shape: ``scales`` and ``zero_points`` [candidates, scales], as ``qtk.ops.candidate_errors``.

    Raises: SpecError if the scales do not fit the weight, or the moments do not tell their blocks apart.
    """
    weight = layer.weight.flatten(0, 1)
    blocks = zip(weight.shape, block_size, strict=True) if block_size else ()
    shape = tuple(1 if size == WHOLE else length // size for length, size in blocks) or (1,)
    rows, columns = shape if block_size else (1, 1)
    if layer.gram.shape[1] % columns:
        raise SpecError(f"{columns} scales along the columns need the moments of as many blocks, or a multiple; there "
                        f"are {layer.gram.shape[1]}; gather them in blocks as long as those of the scales")
    errors = []
    for candidate, scale in enumerate(scales):
        zero = None if zero_points is None else zero_points[candidate].reshape(shape)
        rounded = fake_quantize(weight, scale.reshape(shape), zero, block_size, qmin, qmax)
        parts = layer.errors((weight - rounded).reshape(layer.weight.shape)).flatten(0, 1)  # [rows, blocks]
        errors.append(parts.reshape(rows, len(parts) // rows, columns, -1).sum((1, 3)).flatten())
    least = torch.stack(errors).min(0)
    return Choice(least.indices, least.values)
