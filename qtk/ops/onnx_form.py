"""What ``torch.onnx.export(sim.model, dynamo=True)`` makes of fake-quantize: QuantizeLinear and DequantizeLinear.

Registered as decompositions, which torch's exporter applies to every op that it has no translation for. Per tensor and
per channel, codes of up to 8 bits go through the two ONNX operators, in any opset; all else is written out in float32.
The files of ``sim.export`` are smaller: they hold weights as integers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qtk.numerics.effective import effective_scale, effective_zero_point
from qtk.ops.decomposed import fake_quantized
from qtk.ops.fake_quantize_dynamic import written_out_range
from qtk.torch_private import is_in_onnx_export, register_decomposition

_LIMITS = {torch.int8: (-128, 127), torch.uint8: (0, 255)}


def fake_quantize(
    input: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: Sequence[int], qmin: int, qmax: int
) -> Tensor:
    """``qtk::fake_quantize`` in ONNX operators, outside of an export to ONNX in aten; arguments as the op."""
    kind = next((kind for kind, (low, high) in _LIMITS.items() if low <= qmin and qmax <= high), None)
    kept = [axis for axis, size in enumerate(block_size) if size == 1]
    by_blocks = len(kept) > 1 or any(size > 1 for size in block_size) or (bool(block_size) and not kept)
    if kind is None or by_blocks or not is_in_onnx_export():
        return fake_quantized(input, scale, zero_point, block_size, qmin, qmax).to(input.dtype)
    zero = torch.zeros_like(scale) if zero_point is None else effective_zero_point(zero_point, qmin, qmax)
    shape = [-1] if kept else []
    scale, zero = effective_scale(scale).reshape(shape), zero.to(torch.float32).reshape(shape)
    real = input.to(torch.float32)
    axis = kept[0] if kept else 1
    if (qmin, qmax) != _LIMITS[kind]:
        aligned = [-1, *[1] * (input.ndim - 1 - kept[0])] if kept else []
        bounds = (((code - zero) * scale).reshape(aligned) for code in (qmin, qmax))
        real = torch.clamp(real, *bounds)
    stored = zero.to(kind)
    codes = torch.onnx.ops.symbolic(
        "QuantizeLinear", (real, scale, stored), {"axis": axis}, dtype=kind, shape=real.shape
    )
    result: Tensor = torch.onnx.ops.symbolic(
        "DequantizeLinear", (codes, scale, stored), {"axis": axis}, dtype=torch.float32, shape=real.shape
    )
    return result.to(input.dtype)


def fake_quantize_dynamic(
    input: Tensor, block_size: Sequence[int], qmin: int, qmax: int, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """``qtk::fake_quantize_dynamic`` in ONNX operators, if DynamicQuantizeLinear has its codes, else in aten.

    Arguments and results as the op.
    """
    if not block_size and not symmetric and (qmin, qmax) == _LIMITS[torch.uint8] and is_in_onnx_export():
        kinds, shapes = (torch.uint8, torch.float32, torch.uint8), (input.shape, (), ())
        codes, scale, zero_point = torch.onnx.ops.symbolic_multi_out(
            "DynamicQuantizeLinear", (input.to(torch.float32),), dtypes=kinds, shapes=shapes
        )
        result = torch.onnx.ops.symbolic(
            "DequantizeLinear", (codes, scale, zero_point), dtype=torch.float32, shape=input.shape
        )
        return result.to(input.dtype), scale.reshape(1), zero_point.reshape(1).to(torch.int32)
    scale, zero = written_out_range(input, block_size, qmin, qmax, symmetric=symmetric)
    result = fake_quantized(input, scale, zero, block_size, qmin, qmax).to(input.dtype)
    return result, scale, scale.new_zeros(0, dtype=torch.int32) if zero is None else zero


register_decomposition(torch.ops.qtk.fake_quantize.default)(fake_quantize)
register_decomposition(torch.ops.qtk.fake_quantize_dynamic.default)(fake_quantize_dynamic)
