"""``qtk::candidate_errors``: the quantization error of many candidate ranges, in one pass over a tensor.

Formula in ``qtk.numerics.candidate_errors``; ``block_size`` as in ``qtk.ops.fake_quantize``. It carries no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qtk.core.granularity import WHOLE
from qtk.errors import SpecError
from qtk.numerics import candidate_errors as reference
from qtk.numerics.statistics import count_scales
from qtk.ops.registration import Kernel, register


def _reference(
    input: Tensor, scales: Tensor, zero_points: Tensor | None, block_size: Sequence[int], qmin: int, qmax: int,
    squared: bool, importance: Tensor | None, clipped: float,
) -> Tensor:
    return reference.candidate_errors(
        input, scales, zero_points, block_size, qmin, qmax, norm=2 if squared else 1, importance=importance,
        clipped=clipped,
    )


_OP = register(
    "candidate_errors(Tensor input, Tensor scales, Tensor? zero_points, int[] block_size, int qmin, int qmax, "
    "bool squared, Tensor? importance, float clipped) -> Tensor",
    _reference, lambda input, scales, *spec: torch.empty_like(scales, dtype=torch.float64),
    gpu=Kernel("candidate_errors", "candidate_errors"), native=True,
)


def candidate_errors(
    x: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    block_size: Sequence[int],
    qmin: int,
    qmax: int,
    *,
    norm: float = 2.0,
    importance: Tensor | None = None,
    clipped: float = 1.0,
) -> Tensor:
    """``Σ importance · |x - x̂|^norm`` for every candidate scale; norms 1 and 2 have kernels.

    The error of clipped elements is multiplied by ``clipped``. A float64 ``x`` is computed in float64.

    Shape: ``x`` any; ``scales`` floating and ``zero_points`` int32 [candidates, scales], the scales in their order;
    ``importance`` broadcastable to ``x``; result float64 [candidates, scales].

    Raises: SpecError if blocks do not divide ``x``, or there are not as many scales as blocks.

    >>> errors = candidate_errors(torch.tensor([0.5, 1.5]), torch.tensor([[1.0], [0.5]]), None, (), -8, 7)
    >>> errors.tolist()
    [[0.5], [0.0]]
    """
    blocks = list(zip(x.shape, block_size, strict=False))
    if block_size and (len(block_size) != x.ndim or any(size != WHOLE and length % size for length, size in blocks)):
        raise SpecError(f"blocks of {tuple(block_size)} do not divide a tensor of shape {tuple(x.shape)}")
    count = count_scales(x.shape, block_size)
    if scales.ndim != 2 or scales.shape[1] != count:
        raise SpecError(f"candidates of shape {tuple(scales.shape)} are not [candidates, {count}], as a tensor of "
                        f"shape {tuple(x.shape)} in blocks of {tuple(block_size)} needs")
    if norm not in (1, 2):
        return reference.candidate_errors(
            x, scales, zero_points, block_size, qmin, qmax, norm=norm, importance=importance, clipped=clipped
        )
    errors: Tensor = _OP(
        x, scales, zero_points, block_size, qmin, qmax, norm == 2, importance, clipped
    )
    return errors
