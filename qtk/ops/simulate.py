"""Fake-quantization by a spec, to integers or floating-point formats."""

from __future__ import annotations

from torch import Tensor

import qtk.ops.onnx_form  # noqa: F401  torch.onnx.export finds the ops' decompositions
from qtk.core.dtypes import FloatDtype
from qtk.core.spec import QuantSpec
from qtk.ops.fake_quantize import fake_quantize
from qtk.ops.fake_quantize_dynamic import fake_quantize_dynamic, range_of
from qtk.ops.fake_quantize_float import fake_quantize_float


def simulate(x: Tensor, spec: QuantSpec, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
    """Fake-quantizes ``x`` by ``spec``, with the gradients of the straight-through estimator.

    Shape: ``x`` any, of a floating dtype; ``scale`` and ``zero_point`` the qparam shape of ``spec``; result as ``x``.

    Raises: SpecError if scale or zero point do not fit ``x``.
    """
    block_size = spec.granularity.block_size(x.ndim)
    if isinstance(spec.dtype, FloatDtype):
        return fake_quantize_float(x, scale, block_size, spec.dtype.name)
    return fake_quantize(x, scale, zero_point, block_size, int(spec.qmin), int(spec.qmax))


def simulate_dynamic(x: Tensor, spec: QuantSpec) -> Tensor:
    """Fake-quantizes ``x`` by ``spec`` with a range computed from ``x``; the range carries no gradient.

    Shape: ``x`` any, of a floating dtype; result as ``x``.
    """
    block_size = spec.granularity.block_size(x.ndim)
    if not isinstance(spec.dtype, FloatDtype):
        return fake_quantize_dynamic(x, block_size, int(spec.qmin), int(spec.qmax), symmetric=spec.symmetric)
    scale, _ = range_of(x, block_size, spec.qmin, spec.qmax, symmetric=True)
    return fake_quantize_float(x, scale, block_size, spec.dtype.name)
