"""What each of many candidate ranges would cost: the one sum that range and scale searches compare.

    error[c, s] = Σ importance · |x - x̂(c)|^norm        over the elements of scale s

with x̂ of ``qtk.numerics.affine``; norm 2 and the diagonal of a Gram matrix as importance estimate the error of a
layer's output.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qtk.core.granularity import WHOLE
from qtk.numerics.affine import fake_quantize
from qtk.numerics.blocks import split_shape


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
) -> Tensor:
    """Error of every candidate of every scale.

    Shape: ``x`` any; ``scales`` float32 and ``zero_points`` int32 [candidates, scales], the scales in their order;
    ``importance`` broadcastable to ``x``; result float64 [candidates, scales].

    >>> candidate_errors(torch.tensor([0.5, 1.5]), torch.tensor([[1.0], [0.5]]), None, (), -8, 7).tolist()
    [[0.5], [0.0]]
    """
    x = x.detach()
    blocks = zip(x.shape, block_size, strict=True) if block_size else ()
    kept = [1 if size == WHOLE else length // size for length, size in blocks]
    split, inside = split_shape(x.shape, block_size)
    weights = None if importance is None else importance.detach().to(torch.float64).expand(x.shape)
    errors = torch.empty(scales.shape, dtype=torch.float64, device=x.device)
    wide = x.to(torch.float32)
    for candidate, scale in enumerate(scales):
        zero = None if zero_points is None else zero_points[candidate].reshape(kept or 1)
        size = wide - fake_quantize(wide, scale.reshape(kept or 1), zero, block_size, qmin, qmax)
        size = size.abs_().to(torch.float64).pow_(norm)
        if weights is not None:
            size *= weights
        errors[candidate] = (size.reshape(split).sum(inside) if inside else size).reshape(-1)
    return errors
