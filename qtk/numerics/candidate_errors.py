"""Quantization error of many candidate scales: the weighted sum that range and scale searches minimize.

    error[c, s] = Σ importance · (clipped where x is clipped, else 1) · |x - x̂(c)|^norm     over the elements of scale s

with x̂ as in ``qtk.numerics.affine``, in float64 where ``x`` is float64. Norm 2 with the
diagonal of a Gram matrix as importance estimates the error of a layer's output; ``clipped > 1`` penalizes clipping.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qtk.numerics.blocks import split_shape
from qtk.numerics.effective import effective_scale


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
    """Weighted quantization error of every candidate scale.

    Args:
        x: the tensor.
        scales: the candidates of every scale.
        zero_points: the zero points that belong to them; ``None`` if symmetric.
        block_size: which elements share a scale, as in ``qtk.ops.fake_quantize``.
        qmin: lowest code.
        qmax: highest code.
        norm: exponent of the error.
        importance: weight of each element; ``None``: 1.
        clipped: factor on the error of clipped elements.

    Shape: ``x`` any; ``scales`` floating and ``zero_points`` int32 [candidates, scales], the scales in their order;
    ``importance`` broadcastable to ``x``; result float64 [candidates, scales].

    >>> candidate_errors(torch.tensor([0.5, 1.5]), torch.tensor([[1.0], [0.5]]), None, (), -8, 7).tolist()
    [[0.5], [0.0]]
    """
    real = torch.float64 if x.dtype == torch.float64 else torch.float32
    split, inside = split_shape(x.shape, block_size)
    lined = [1 if axis in inside else length for axis, length in enumerate(split)]
    wide = x.detach().to(real).reshape(split)
    weights = None if importance is None else importance.detach().to(torch.float64).expand(x.shape).reshape(split)
    errors = torch.empty(scales.shape, dtype=torch.float64, device=x.device)
    for candidate, scale in enumerate(effective_scale(scales.detach().to(real))):
        aligned_scale = scale.reshape(lined)
        zero = 0.0 if zero_points is None else zero_points[candidate].to(real).reshape(lined)
        code = (wide / aligned_scale).round_().add_(zero)
        nearest = code.clamp(qmin, qmax)
        size = (wide - (nearest - zero) * aligned_scale).abs_().to(torch.float64).pow_(norm)
        if clipped != 1:
            size *= torch.where(nearest == code, 1.0, clipped)
        if weights is not None:
            size *= weights
        errors[candidate] = (size.sum(inside) if inside else size).reshape(-1)
    return errors
