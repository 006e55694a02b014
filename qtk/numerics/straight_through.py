"""Gradients of fake-quantization, straight through the rounding.

With ``v = round(x / scale) + zero_point`` and ``inside = qmin ≤ v ≤ qmax``, for an incoming gradient g:

    dx          = g · inside
    dscale      = Σ g · (round(x / scale) - x / scale   where inside, else clamp(v) - zero_point)
    dzero_point = Σ g · (0                              where inside, else -scale)

LSQ (arXiv 1902.08153, eq. 3) and LSQ+ (arXiv 2004.09576, eq. 5), without their gradient scaling.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qtk.numerics.affine import expand


def fake_quantize_backward(
    grad: Tensor,
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    block_size: Sequence[int],
    qmin: int,
    qmax: int,
    *,
    wants_scale: bool,
    wants_zero_point: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of ``x``, ``scale`` and ``zero_point``; the last two only where wanted.

    Shape: ``grad``, ``x`` and the first result alike; the others the qparam shape, float32.
    """
    wide_scale = expand(scale, x.shape, block_size)
    zero = torch.zeros((), device=x.device) if zero_point is None else expand(zero_point, x.shape, block_size).round()
    steps = x.to(torch.float32) / wide_scale
    nearest = steps.round()
    inside = (nearest + zero >= qmin) & (nearest + zero <= qmax)
    grad_x = grad * inside
    wide = grad.to(torch.float32)
    grad_scale = grad_zero_point = None
    if wants_scale:
        clipped = (nearest + zero).clamp(qmin, qmax) - zero
        grad_scale = _reduce(wide * torch.where(inside, nearest - steps, clipped), scale, block_size)
    if wants_zero_point:
        grad_zero_point = _reduce(torch.where(inside, torch.zeros_like(wide), -wide * wide_scale), scale, block_size)
    return grad_x, grad_scale, grad_zero_point


def _reduce(values: Tensor, like: Tensor, block_size: Sequence[int]) -> Tensor:
    """Sums ``values`` over the elements that share a scale. Shape: result as ``like``."""
    if not block_size:
        return values.sum().reshape(like.shape)
    if like.ndim != values.ndim:
        kept = block_size.index(1)
        return values.sum([axis for axis in range(values.ndim) if axis != kept]).reshape(like.shape)
    split = [length for axis, count in enumerate(like.shape) for length in (count, values.shape[axis] // max(count, 1))]
    return values.reshape(split).sum(list(range(1, 2 * values.ndim, 2)))
