"""``qtk::fake_quantize_float``: the op behind every quantizer to a floating-point format, with its gradient.

Formulas of ``qtk.numerics.minifloat``; ``block_size`` and backends as in ``qtk.ops.fake_quantize``. A format is given
by its exponent bits, its mantissa bits and its largest number. Under ``torch.compile`` it is plain aten.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qtk.core.dtypes import DTYPES, FloatDtype
from qtk.numerics import minifloat
from qtk.numerics.blocks import check_fit
from qtk.numerics.minifloat import format_of
from qtk.ops.decomposed import laid_out_as
from qtk.ops.forward_mode import refuse_forward_mode
from qtk.ops.registration import Kernel, like_first, register
from qtk.ops.straight_through import StraightThrough
from qtk.torch_private import is_exporting


def _forward(
    input: Tensor, scale: Tensor, block_size: Sequence[int], exponent_bits: int, mantissa_bits: int, largest: float
) -> Tensor:
    format = format_of(exponent_bits, mantissa_bits, largest)
    return minifloat.fake_quantize(input.detach(), scale.detach(), block_size, format)


def written_out(
    input: Tensor, scale: Tensor, block_size: Sequence[int], exponent_bits: int, mantissa_bits: int, largest: float
) -> Tensor:
    """``qtk::fake_quantize_float`` in plain aten without writes; arguments as the op."""
    format = format_of(exponent_bits, mantissa_bits, largest)
    return minifloat.fake_quantized(input, scale, block_size, format).to(input.dtype)


def _backward(
    grad: Tensor, input: Tensor, scale: Tensor, block_size: Sequence[int], exponent_bits: int, mantissa_bits: int,
    largest: float, wants_scale: bool,
) -> tuple[Tensor, Tensor]:
    format = format_of(exponent_bits, mantissa_bits, largest)
    dx, dscale = minifloat.fake_quantize_backward(grad.detach(), input.detach(), scale.detach(), block_size, format)
    return dx, dscale if wants_scale else scale.new_empty(0)


_SPEC = "Tensor scale, int[] block_size, int exponent_bits, int mantissa_bits, float largest"
_ESTIMATOR = StraightThrough(
    lambda x, scale, block_size, *numbers: minifloat.derivative_by_scale(x, scale, block_size, format_of(*numbers)),
    lambda *given: _BACKWARD(*given), has_zero_point=False,
)
_BACKWARD: Any = register(
    f"fake_quantize_float_backward(Tensor grad, Tensor input, {_SPEC}, bool wants_scale) -> (Tensor, Tensor)",
    _backward, _ESTIMATOR.fake, gpu=Kernel("fake_quantize", "fake_quantize_float_backward"),
    gradient=_ESTIMATOR.twice,
)
_OP = register(
    f"fake_quantize_float(Tensor input, {_SPEC}) -> Tensor", _forward, like_first,
    gpu=Kernel("fake_quantize", "fake_quantize_float"), gradient=_ESTIMATOR.once(_BACKWARD),
)


class _Decomposed(torch.autograd.Function):
    """Forward and straight-through backward in plain aten, for compilers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, *spec: Any) -> Tensor:
        ctx.save_for_backward(x, scale)
        ctx.spec = spec
        block_size, *numbers = spec
        return laid_out_as(x, x.dtype, minifloat.fake_quantized(x, scale, block_size, format_of(*numbers)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale = ctx.saved_tensors
        block_size, *numbers = ctx.spec
        dx, dscale = minifloat.fake_quantize_backward(grad, x, scale, block_size, format_of(*numbers))
        return dx, dscale if ctx.needs_input_grad[1] else None, None, None, None, None


def fake_quantize_float(x: Tensor, scale: Tensor, block_size: Sequence[int], format: str) -> Tensor:
    """Fake-quantizes ``x`` to a minifloat, with the gradients of the straight-through estimator.

    ``format`` is the name of a float dtype in ``qtk.core.dtypes``.

    Shape: ``x`` any, of a floating dtype; ``scale`` float32 in the qparam shape; result as ``x``, same strides.

    Raises: SpecError if the scale does not fit ``x``.

    >>> fake_quantize_float(torch.tensor([0.3, 9.0]), torch.tensor([0.5]), (), "fp4_e2m1")
    tensor([0.2500, 3.0000])
    """
    row = DTYPES[format]
    assert isinstance(row, FloatDtype)
    numbers = row.exponent_bits, row.mantissa_bits, row.largest
    result: Tensor
    if torch.compiler.is_compiling() and not is_exporting():
        result = _Decomposed.apply(x, scale, block_size, *numbers)
        return result
    refuse_forward_mode("qtk::fake_quantize_float", x, scale)
    try:
        result = _OP(x, scale, block_size, *numbers)
    except ValueError:
        check_fit(scale, x.shape, block_size)  # raises a SpecError with the shapes
        raise
    return result
