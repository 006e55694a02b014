"""Fake-quantization by a spec, to integers or floating-point formats."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import pad

import qtk.ops.onnx_form  # noqa: F401  torch.onnx.export finds the ops' decompositions
from qtk.core.dtypes import FloatDtype
from qtk.core.granularity import PerTokenBlock
from qtk.core.spec import QuantSpec
from qtk.numerics.scale_formats import run_time_scales
from qtk.ops.fake_quantize import fake_quantize
from qtk.ops.fake_quantize_dynamic import fake_quantize_dynamic, range_of
from qtk.ops.fake_quantize_float import fake_quantize_float


def simulate(x: Tensor, spec: QuantSpec, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
    """Fake-quantizes ``x`` by ``spec``, with the gradients of the straight-through estimator.

    Shape: ``x`` any, of a floating dtype; ``scale`` and ``zero_point`` the qparam shape of ``spec``; result as ``x``.

    Raises: SpecError if scale or zero point do not fit ``x``.
    """
    if isinstance(spec.granularity, PerTokenBlock):
        return _simulate_in_blocks(x, spec, spec.granularity, scale)
    return _rounded(x, spec, scale, zero_point, spec.granularity.block_size(x.ndim))


def simulate_dynamic(x: Tensor, spec: QuantSpec) -> Tensor:
    """Fake-quantizes ``x`` by ``spec`` with a range computed from ``x``; the range carries no gradient.

    Shape: ``x`` any, of a floating dtype; result as ``x``.
    """
    if isinstance(spec.granularity, PerTokenBlock):
        return _simulate_in_blocks(x, spec, spec.granularity, None)
    block_size = spec.granularity.block_size(x.ndim)
    if not isinstance(spec.dtype, FloatDtype):
        return fake_quantize_dynamic(x, block_size, int(spec.qmin), int(spec.qmax), symmetric=spec.symmetric)
    scale, _ = range_of(x, block_size, spec.qmin, spec.qmax, symmetric=True)
    return fake_quantize_float(x, scale, block_size, spec.dtype.name)


def _simulate_in_blocks(x: Tensor, spec: QuantSpec, blocks: PerTokenBlock, scale: Tensor | None) -> Tensor:
    """Fake-quantizes ``x`` in blocks along an axis, the last one filled with zeros; ``scale`` is the calibrated one."""
    sizes = blocks.sizes(x.ndim)
    if not x.numel():
        return x.clone()
    length = x.shape[blocks.axis]
    missing = -length % blocks.length
    whole = pad(x, (*[0, 0] * (-blocks.axis - 1), 0, missing)) if missing else x
    zero_point = None
    if spec.scale_format is None:
        scale, zero_point = range_of(whole, sizes, spec.qmin, spec.qmax, symmetric=spec.symmetric)
    else:
        scale = run_time_scales(whole.detach(), sizes, spec, scale)
    result = _rounded(whole, spec, scale, zero_point, sizes)
    return result.narrow(blocks.axis, 0, length) if missing else result


def _rounded(
    x: Tensor, spec: QuantSpec, scale: Tensor, zero_point: Tensor | None, block_size: Sequence[int]
) -> Tensor:
    if isinstance(spec.dtype, FloatDtype):
        return fake_quantize_float(x, scale, block_size, spec.dtype.name)
    return fake_quantize(x, scale, zero_point, block_size, int(spec.qmin), int(spec.qmax))
