"""``qtk::fake_quantize_float``: the op behind a quantizer to a small float, with its gradient.

Formulas of ``qtk.numerics.minifloat``; ``block_size`` as in ``qtk.ops.fake_quantize``, ``format`` a name of
``qtk.core.dtypes``. Compilers see plain aten.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qtk.core.dtypes import DTYPES, FloatDtype
from qtk.numerics import minifloat


def _forward(input: Tensor, scale: Tensor, block_size: Sequence[int], format: str) -> Tensor:
    return minifloat.fake_quantize(input.detach(), scale.detach(), block_size, _format(format))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, scale, ctx.block_size, ctx.format = inputs
    ctx.save_for_backward(input, scale)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    input, scale = ctx.saved_tensors
    dx, dscale = minifloat.fake_quantize_backward(grad, input, scale, ctx.block_size, _format(ctx.format))
    wants_x, wants_scale, *_ = ctx.needs_input_grad
    return dx if wants_x else None, dscale if wants_scale else None, None, None


def _format(name: str) -> FloatDtype:
    format = DTYPES[name]
    assert isinstance(format, FloatDtype)
    return format


torch.library.define(
    "qtk::fake_quantize_float", "(Tensor input, Tensor scale, int[] block_size, str format) -> Tensor"
)
torch.library.impl("qtk::fake_quantize_float", "CompositeExplicitAutograd", _forward)
torch.library.register_fake("qtk::fake_quantize_float", lambda input, *spec: torch.empty_like(input))
torch.library.register_autograd("qtk::fake_quantize_float", _backward, setup_context=_setup_context)


class _Decomposed(torch.autograd.Function):
    forward = staticmethod(_forward)
    setup_context = staticmethod(_setup_context)
    backward = staticmethod(_backward)


def fake_quantize_float(x: Tensor, scale: Tensor, block_size: Sequence[int], format: str) -> Tensor:
    """``x`` rounded to the numbers of a small float times its scale, with straight-through gradients.

    Shape: ``x`` any, of a floating dtype; ``scale`` float32 in the qparam shape; result as ``x``, same strides.

    Raises: SpecError if the scale does not fit ``x``.

    >>> fake_quantize_float(torch.tensor([0.3, 9.0]), torch.tensor([0.5]), (), "fp4_e2m1")
    tensor([0.2500, 3.0000])
    """
    result: Tensor
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        result = _Decomposed.apply(x, scale, block_size, format)
    else:
        result = torch.ops.qtk.fake_quantize_float.default(x, scale, block_size, format)
    return result
