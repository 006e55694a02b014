"""Gradients of fake-quantization by the straight-through estimator.

With ``v = round(x / scale) + zero_point`` and ``inside = qmin ≤ v ≤ qmax``, for an incoming gradient g:

    dx          = g where inside, else 0
    dscale      = Σ g · (round(x / scale) - x / scale   where inside, else clamp(v) - zero_point)
    dzero_point = Σ g · (0                              where inside, else -scale)

summed over the elements that share a scale: LSQ (arXiv 1902.08153, eq. 3) and LSQ+ (arXiv 2004.09576, eq. 5), without
their gradient scaling. Second derivatives: x̂ is linear in x and in scale where inside, and bilinear in scale and
zero_point elsewhere, so that only those in (g, ·) and in (scale, zero_point) are not 0. Scale and zero point are the
effective ones of ``qtk.numerics.effective``. NaN counts as outside and makes dscale NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qtk.numerics.blocks import align, pieces, split_shape, sum_blocks
from qtk.numerics.effective import effective_scale, effective_scale_backward, effective_zero_point


def fake_quantize_backward(
    grad: Tensor,
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    block_size: Sequence[int],
    qmin: int,
    qmax: int,
    wants_scale: bool,
    wants_zero_point: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``x``, ``scale`` and ``zero_point``; those not wanted are empty.

    Shape: ``grad`` and ``x`` the same; the first result in the layout of ``x`` and the dtype of ``grad``, the others
    float32 in the qparam shape.

    Raises: SpecError if scale or zero point do not fit ``x``.
    """
    grad, x, stored_scale, scale = grad.detach(), x.detach(), scale.detach(), effective_scale(scale.detach())
    zero_point = None if zero_point is None else effective_zero_point(zero_point.detach(), qmin, qmax)
    grad_x = torch.empty_like(x, dtype=grad.dtype)
    grad_scale = torch.zeros_like(scale) if wants_scale else None
    grad_zero_point = torch.zeros_like(scale) if wants_zero_point else None
    for (part, grad_part, out), (part_scale, zero, of_scale, of_zero) in pieces(
        (x, grad, grad_x), (scale, zero_point, grad_scale, grad_zero_point), block_size
    ):
        assert part_scale is not None
        steps = torch.div(part.to(torch.float32), part_scale)
        code = steps.round_() if of_scale is None else steps.round()
        if zero is not None:
            code.add_(zero)
        straight = out if out.dtype == torch.float32 else torch.empty_like(code)
        _inside(grad_part, code, qmin, qmax, out=straight)
        if straight is not out:
            out.copy_(straight)
        if of_zero is not None:
            of_zero.sub_(sum_blocks(grad_part - straight, x.shape, block_size) * part_scale)
        if of_scale is not None:
            _inside(steps, code, qmin, qmax, out=steps)
            code.clamp_(qmin, qmax)
            real = code if zero is None else code.sub_(zero)
            of_scale.add_(sum_blocks(real.sub_(steps).mul_(grad_part), x.shape, block_size))
    dscale = None if grad_scale is None else effective_scale_backward(grad_scale, stored_scale)
    return grad_x, *empty_if_unwanted(scale, dscale, grad_zero_point)


def empty_if_unwanted(scale: Tensor, dscale: Tensor | None, dzero_point: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gradients of a range as an operator returns them: an empty tensor in place of ``None``, of its own memory."""
    return (
        scale.new_empty(0) if dscale is None else dscale, scale.new_empty(0) if dzero_point is None else dzero_point
    )


def second_backward(
    grad: Tensor, inside: Tensor, error: Tensor, scale: Tensor, block_size: Sequence[int],
    of_grads: tuple[Tensor, Tensor | None, Tensor | None],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``grad``, ``scale`` and ``zero_point``, for given gradients of the results of the first backward.

    Shape: ``grad`` and the first of ``of_grads`` as x; ``inside`` and ``error`` in its split shape; ``scale``, the
    others of ``of_grads`` and the last two results in the qparam shape.

    Args:
        grad: the gradient that was the first backward's input.
        inside: where the code was not clamped.
        error: derivative of x̂ with respect to the effective scale.
        scale: as stored, of either sign.
        block_size: as in ``qtk.ops.fake_quantize``.
        of_grads: gradients of dx, dscale and dzero_point; ``None`` for those that were not computed.
    """
    of_dx, of_dscale, of_dzero = of_grads
    shape, upstream = grad.shape, grad.to(torch.float32).reshape(inside.shape)
    of_grad = torch.where(inside, of_dx.to(torch.float32).reshape(inside.shape), 0.0)
    clipped = sum_blocks(torch.where(inside, 0.0, upstream), shape, block_size).reshape(scale.shape)
    of_scale = of_zero_point = torch.zeros_like(scale)
    if of_dscale is not None:
        signed = effective_scale_backward(of_dscale, scale)
        of_grad = of_grad + align(signed, shape, block_size) * error
        of_zero_point = -signed * clipped
    if of_dzero is not None:
        drop = align(of_dzero * effective_scale(scale), shape, block_size)
        of_grad = of_grad - torch.where(inside, 0.0, drop)
        of_scale = -effective_scale_backward(of_dzero * clipped, scale)
    return of_grad.reshape(shape).to(grad.dtype), of_scale, of_zero_point


def derivative_by_scale(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: Sequence[int], qmin: int, qmax: int
) -> tuple[Tensor, Tensor]:
    """Where the code is not clamped, and the derivative of x̂ by the effective scale. Shape: the split shape of x."""
    step = align(effective_scale(scale), x.shape, block_size)
    zero = 0.0 if zero_point is None else align(effective_zero_point(zero_point, qmin, qmax), x.shape, block_size)
    ratio = x.to(torch.float32).reshape(split_shape(x.shape, block_size)[0]) / step
    code = ratio.round() + zero
    inside = (code >= qmin) & (code <= qmax)
    return inside, torch.where(inside, ratio.round() - ratio, code.clamp(qmin, qmax) - zero)


def _inside(values: Tensor, code: Tensor, qmin: int, qmax: int, *, out: Tensor) -> None:
    """Writes ``values`` where the unclamped code lies in [qmin, qmax], 0 elsewhere and at NaN."""
    # hardtanh's gradient is over an open interval: for integers (qmin - 1, qmax + 1) is [qmin, qmax]. It is one
    # vectorized pass; comparing and selecting by a boolean mask takes ten times as long on the CPU.
    torch.ops.aten.hardtanh_backward.grad_input(
        values, code.nan_to_num(torch.inf), qmin - 1, qmax + 1, grad_input=out
    )
