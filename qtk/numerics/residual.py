"""What the backward pass needs to know of each element, in one or two bytes: the *residual* that training saves.

With ``steps = x / scale``, ``v = round(steps) + zero_point`` and ``inside = qmin ≤ v ≤ qmax``, the residual of an
element is, as int8 where the range is fixed,

    0 inside, 1 inside and x > 0, -1 outside, 2 outside and x > 0 (or NaN)

and as int16 where it is learned,

    round((round(steps) - steps) · RESOLUTION) inside, EXACT_ZERO where x = 0, LOW, HIGH or NOT_A_NUMBER outside.

The gradients follow ``qtk.numerics.straight_through``, but ``round(steps) - steps`` has an error of at most
``1 / (2 · RESOLUTION)`` = 2⁻¹⁷: as much as float32 leaves of it in ``x / scale`` with 8 bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qtk.numerics.blocks import align, pieces, split_shape, sum_blocks
from qtk.numerics.effective import effective_scale, effective_scale_backward, effective_zero_point
from qtk.numerics.straight_through import empty_if_unwanted

RESOLUTION = 65530
"""Units of a learned range's residual in one step of the scale."""

LOW, NOT_A_NUMBER, EXACT_ZERO, HIGH = -32768, -32767, 32766, 32767
"""Residuals that are no distances: clipped at qmin, NaN, x = 0, clipped at qmax."""


def fake_quantize(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: Sequence[int], qmin: int, qmax: int, learned: bool
) -> tuple[Tensor, Tensor]:
    """``qtk.numerics.affine.fake_quantize`` and the residual, of int16 if the range is ``learned``, else int8.

    Shape: ``x`` any; both results in its layout.

    Raises: SpecError if scale or zero point do not fit ``x``.

    >>> x, scale = torch.tensor([-9.0, -0.25, 0.0, 0.75, 9.0]), torch.tensor([0.5])
    >>> fake_quantize(x, scale, None, (), -8, 7, False)
    (tensor([-4.0000,  0.0000,  0.0000,  1.0000,  3.5000]), tensor([-1,  0,  0,  1,  2], dtype=torch.int8))
    >>> fake_quantize(x, scale, None, (), -8, 7, True)[1].tolist()
    [-32768, 32765, 32766, 32765, 32767]
    """
    x, scale = x.detach(), effective_scale(scale.detach())
    zero_point = None if zero_point is None else effective_zero_point(zero_point.detach(), qmin, qmax)
    result = torch.empty_like(x)
    residual = torch.empty_like(x, dtype=torch.int16 if learned else torch.int8)
    for (part, out, kept), (part_scale, zero) in pieces((x, result, residual), (scale, zero_point), block_size):
        assert part_scale is not None
        shift = 0.0 if zero is None else zero
        steps = torch.div(part.to(torch.float32), part_scale)
        nearest = steps.round()
        code = nearest + shift
        clamped = code.clamp(qmin, qmax)
        out.copy_((clamped - shift) * part_scale)
        inside = code == clamped
        if not learned:
            positive = ~(part <= 0)
            kept.copy_(torch.where(inside, positive.to(torch.int8), positive * 3 - 1))
            continue
        outside = torch.where(code < clamped, LOW, torch.where(code > clamped, HIGH, NOT_A_NUMBER))
        distance = torch.where(inside, (nearest - steps) * RESOLUTION, 0.0).round().to(torch.int32)
        kept.copy_(torch.where(inside, torch.where(part == 0, EXACT_ZERO, distance), outside))
    return result, residual


def fake_quantize_backward(
    grad: Tensor,
    residual: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    block_size: Sequence[int],
    qmin: int,
    qmax: int,
    wants_scale: bool,
    wants_zero_point: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``x``, ``scale`` and ``zero_point`` from the residual; those not wanted are empty.

    Shape: ``grad`` and ``residual`` as x; results as in ``qtk.numerics.straight_through``.

    Raises: SpecError if scale or zero point do not fit; ValueError if a gradient of the range is wanted of a fixed one.
    """
    if residual.dtype == torch.int8 and (wants_scale or wants_zero_point):
        raise ValueError("an int8 residual holds no gradient of the range; save one for a learned range")
    grad = grad.detach()
    grad_x = torch.empty_like(residual, dtype=grad.dtype)
    if residual.dtype == torch.int8:
        return grad_x.copy_(torch.where(is_inside(residual), grad, 0.0)), *empty_if_unwanted(scale, None, None)
    grad_scale = torch.zeros_like(scale) if wants_scale else None
    grad_zero_point = torch.zeros_like(scale) if wants_zero_point else None
    stored_scale, scale = scale.detach(), effective_scale(scale.detach())
    zero_point = None if zero_point is None else effective_zero_point(zero_point.detach(), qmin, qmax)
    for (kept, grad_part, out), (part_scale, zero, of_scale, of_zero) in pieces(
        (residual, grad, grad_x), (scale, zero_point, grad_scale, grad_zero_point), block_size
    ):
        assert part_scale is not None
        inside = is_inside(kept)
        out.copy_(torch.where(inside, grad_part, 0.0))
        if of_zero is not None:
            clipped = torch.where(inside, 0.0, grad_part.float())
            of_zero.sub_(sum_blocks(clipped, residual.shape, block_size) * part_scale)
        if of_scale is not None:
            error = _error(kept, 0.0 if zero is None else zero, qmin, qmax)
            of_scale.add_(sum_blocks(error.mul_(grad_part), residual.shape, block_size))
    dscale = None if grad_scale is None else effective_scale_backward(grad_scale, stored_scale)
    return grad_x, *empty_if_unwanted(scale, dscale, grad_zero_point)


def is_inside(residual: Tensor) -> Tensor:
    """Where the code was not clamped. Shape: as ``residual``, bool.

    >>> is_inside(torch.tensor([-1, 0, 1, 2], dtype=torch.int8))
    tensor([False,  True,  True, False])
    >>> is_inside(torch.tensor([LOW, NOT_A_NUMBER, -5, EXACT_ZERO, HIGH], dtype=torch.int16))
    tensor([False, False,  True,  True, False])
    """
    if residual.dtype == torch.int8:
        return (residual >> 1) == 0
    return (residual > NOT_A_NUMBER) & (residual < HIGH)


def derivative_by_scale(
    residual: Tensor, zero_point: Tensor | None, block_size: Sequence[int], qmin: int, qmax: int
) -> tuple[Tensor, Tensor]:
    """As ``qtk.numerics.straight_through.derivative_by_scale``, from the residual of a learned range."""
    shape = split_shape(residual.shape, block_size)[0]
    zero = 0.0 if zero_point is None else align(
        effective_zero_point(zero_point, qmin, qmax), residual.shape, block_size
    )
    residual = residual.reshape(shape)
    return is_inside(residual), _error(residual, zero, qmin, qmax)


def _error(residual: Tensor, zero_point: Tensor | float, qmin: int, qmax: int) -> Tensor:
    """The derivative of x̂ by the effective scale. Shape: as ``residual``, with which ``zero_point`` broadcasts."""
    distance = torch.where(residual == EXACT_ZERO, 0, residual).to(torch.float32) * (1 / RESOLUTION)
    distance = torch.where(residual == NOT_A_NUMBER, torch.nan, distance)
    return torch.where(residual == LOW, qmin - zero_point,
                       torch.where(residual == HIGH, qmax - zero_point, distance))


def is_positive(residual: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of ``dtype`` that is positive where x, a result of a ReLU, was positive or NaN, and else is not.

    >>> is_positive(torch.tensor([0, 5, EXACT_ZERO, HIGH], dtype=torch.int16), torch.float32).tolist()
    [1.0, 1.0, 0.0, 1.0]
    """
    if residual.dtype == torch.int8:
        return residual.to(dtype)
    return torch.ne(residual, EXACT_ZERO, out=torch.empty_like(residual, dtype=dtype))
