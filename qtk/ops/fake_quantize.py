"""``qtk::fake_quantize``: the op behind every quantizer, with its gradient.

The formula is in ``qtk.numerics.affine``, the formula of the gradient in ``qtk.numerics.straight_through``.
``block_size`` is ``[]`` for one scale over the whole tensor, else one entry an axis: 1 for one index, -1 for the whole
axis, n for blocks of n.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from qtk.kernels.backends import native
from qtk.numerics import affine, straight_through
from qtk.numerics.blocks import check_range
from qtk.ops.decomposed import FakeQuantize
from qtk.ops.eager_function import differentiable
from qtk.ops.fake_quantize_residual import fake_quantize_with_residual, is_learned, saves_residual
from qtk.ops.forward_mode import refuse_forward_mode
from qtk.ops.registration import NATIVE, Kernel, like_first, register
from qtk.ops.straight_through import StraightThrough
from qtk.torch_private import below_autograd, is_exporting, is_traced

_SPEC = "Tensor scale, Tensor? zero_point, int[] block_size, int qmin, int qmax"
_ESTIMATOR = StraightThrough(straight_through.derivative_by_scale, lambda *given: BACKWARD(*given))

BACKWARD: Any = register(
    f"fake_quantize_backward(Tensor grad, Tensor input, {_SPEC}, bool wants_scale, bool wants_zero_point) -> "
    "(Tensor, Tensor, Tensor)",
    straight_through.fake_quantize_backward, _ESTIMATOR.fake, gpu=Kernel("fake_quantize", "fake_quantize_backward"),
    gradient=_ESTIMATOR.twice, native=True,
)
_OP = register(
    f"fake_quantize(Tensor input, {_SPEC}) -> Tensor", affine.fake_quantize, like_first,
    gpu=Kernel("fake_quantize", "fake_quantize"), gradient=_ESTIMATOR.once(BACKWARD), native=True,
)
_twice_differentiable = differentiable(BACKWARD, *_ESTIMATOR.twice)


def _backward_of_learned(*given: Any) -> Any:
    """Without a derivative where nobody can ask for one."""
    return (_twice_differentiable if torch.is_grad_enabled() or is_traced() else BACKWARD)(*given)


_learned = differentiable(_OP, *_ESTIMATOR.once(_backward_of_learned))
"""The operator for ranges that are learned: unlike the operator of the C++ library, it has second derivatives."""


def with_range(
    scale: Tensor, zero_point: Tensor | None, block_size: Sequence[int], qmin: int, qmax: int
) -> Callable[[Tensor], Tensor]:
    """Binds ``fake_quantize`` to a range, without its checks, for calls that record no gradient.

    By the C++ library it takes a third of the time of the operator for a small tensor: no argument is converted.

    >>> with_range(torch.tensor([0.25]), None, (), -8, 7)(torch.tensor([0.3, 9.0]))
    tensor([0.2500, 1.7500])
    """
    given = scale, zero_point, block_size, qmin, qmax
    if NATIVE:
        bound: Callable[[Tensor], Tensor] = native().BoundRange(_OP, *given)
        return bound
    return lambda x: fake_quantize(x, *given)


def fake_quantize(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: Sequence[int], qmin: int, qmax: int
) -> Tensor:
    """Fake-quantizes ``x``, with the gradients of the straight-through estimator.

    Shape: ``x`` any, of a floating dtype; ``scale`` float32 and ``zero_point`` int32, or float32 and rounded to a
    code, in the qparam shape; result as ``x``, same strides.

    Raises: SpecError if scale or zero point do not fit ``x``.

    >>> fake_quantize(torch.tensor([0.3, 9.0]), torch.tensor([0.25]), None, (), -8, 7)
    tensor([0.2500, 1.7500])
    """
    result: Tensor
    if torch.compiler.is_compiling() and not is_exporting():
        result = FakeQuantize.apply(x, scale, zero_point, block_size, qmin, qmax)
        return result
    is_compiling = torch.compiler.is_compiling()
    if not NATIVE and not is_compiling:
        refuse_forward_mode("qtk::fake_quantize", x, scale, zero_point)
    try:
        if not is_compiling and saves_residual(x, scale, zero_point):
            return fake_quantize_with_residual(x, scale, zero_point, block_size, qmin, qmax)
        if not is_compiling and torch.is_grad_enabled() and is_learned(scale, zero_point):
            result = _learned(x, scale, zero_point, block_size, qmin, qmax)
            return result
        if NATIVE or is_compiling or (torch.is_grad_enabled() and x.requires_grad):
            result = _OP(x, scale, zero_point, block_size, qmin, qmax)
            return result
        with below_autograd():  # the op's autograd layer is Python: as slow as the math of a small x
            result = _OP(x, scale, zero_point, block_size, qmin, qmax)
        return result
    except ValueError:
        check_range(scale, zero_point, x.shape, block_size)  # raises a SpecError with the shapes
        raise
