"""Specs as arguments of the library's ``QuantizationArgs``, and the numbers of weights in the library's shapes.

Codes are stored signed: codes of an unsigned format less ``2^(bits - 1)``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qtk.core.dtypes import DTYPES, FloatDtype
from qtk.core.encoding import Encoding
from qtk.core.granularity import WHOLE, PerChannel, PerTensor, PerToken, PerTokenBlock
from qtk.core.spec import QuantSpec, ScaleFormat
from qtk.numerics.matrix_axes import MatrixAxes
from qtk.numerics.scale_formats import LARGEST_E4M3, tensor_scale_of

BITS = (4, 8)
FP8, FP4 = DTYPES["fp8_e4m3"], DTYPES["fp4_e2m1"]
NVFP4_LENGTH, MXFP4_LENGTH = 16, 32


class Unsuited(Exception):  # noqa: N818  it is a reason
    """The reason why the format cannot hold a value."""


def weight_arguments(encoding: Encoding, axes: MatrixAxes, shape: tuple[int, ...]) -> dict[str, object]:
    """Says how a weight is quantized, or each matrix of a stack.

    A weight [in, out], as Hugging Face's ``Conv1D`` has, is described in blocks of ``block`` x 1.

    Raises: Unsuited if the format has no such codes or scales.
    """
    spec = encoding.spec
    scale = scale_matrices(encoding.scale, spec, axes, shape)
    _, outputs, blocks = scale.shape
    (columns,) = (shape[axis] for axis in axes.columns)
    arguments = {**_number_format(spec), "symmetric": spec.symmetric, "dynamic": False}
    is_transposed = axes.outputs[0] > axes.columns[0]
    if spec.scale_format in (ScaleFormat.E4M3, ScaleFormat.E8M0) and is_transposed:
        raise Unsuited("is [inputs, outputs], and four-bit floats are packed along the last axis, which must count the "
                       "inputs; give it integers in blocks, as int4, or weight: float")
    if spec.scale_format is ScaleFormat.E4M3:
        if columns != blocks * NVFP4_LENGTH:
            raise Unsuited(f"has scales {spec.granularity}; nvfp4 has one for each {NVFP4_LENGTH} inputs")
        return {**arguments, "strategy": "tensor_group", "group_size": NVFP4_LENGTH,
                "scale_dtype": torch.float8_e4m3fn}
    if spec.scale_format is ScaleFormat.E8M0:
        if columns != blocks * MXFP4_LENGTH:
            raise Unsuited(f"has scales {spec.granularity}; mxfp4 has one for each {MXFP4_LENGTH} inputs")
        return {**arguments, "strategy": "group", "group_size": MXFP4_LENGTH, "scale_dtype": torch.uint8,
                "zp_dtype": torch.uint8}
    if spec.scale_format is not None:
        raise Unsuited(f"has scales stored as {spec.scale_format.value}")
    if isinstance(spec.granularity, PerTensor):
        return {**arguments, "strategy": "tensor"}
    (rows,) = (shape[axis] for axis in axes.outputs)
    if outputs != rows:
        raise Unsuited(f"has scales {spec.granularity}, not one for each output")
    if is_transposed and not axes.stack:
        return {**arguments, "strategy": "block", "block_structure": [columns // blocks, 1]}
    if blocks == 1:
        return {**arguments, "strategy": "channel"}
    return {**arguments, "strategy": "group", "group_size": columns // blocks}


def input_arguments(spec: QuantSpec) -> dict[str, object]:
    """Says how the input of a layer is quantized.

    Raises: Unsuited if the format, or a server's kernels, have no such codes or scales.
    """
    if isinstance(spec.granularity, PerTokenBlock):
        return _block_arguments(spec, spec.granularity)
    arguments = {**_number_format(spec), "symmetric": spec.symmetric, "dynamic": spec.dynamic}
    if spec.dtype.bits != FP8.bits:
        raise Unsuited(f"is an activation of {spec.dtype}; servers have int8 and fp8_e4m3")
    if spec.dynamic and spec.symmetric and not isinstance(spec.dtype, FloatDtype) and not spec.narrow_range:
        raise Unsuited("is an activation with scales max(|max| / 127, |min| / 128), where servers' kernels have "
                       "max|x| / 127: add narrow_range: true to its setting")
    if not spec.dynamic and spec.narrow_range:
        raise Unsuited("is an activation that never has the lowest code, which kernels do use: take narrow_range: true "
                       "out of its setting")
    match spec.granularity:
        case PerTensor():
            return {**arguments, "strategy": "tensor"}
        case PerToken():
            return {**arguments, "strategy": "token"}
    raise Unsuited(f"is an activation with scales {spec.granularity}; servers have per_tensor and per_token")


def _block_arguments(spec: QuantSpec, blocks: PerTokenBlock) -> dict[str, object]:
    stored = {"num_bits": FP4.bits, "type": "float", "symmetric": True, "group_size": blocks.length}
    if blocks.axis == -1 and spec.dtype == FP4 and not spec.dynamic and blocks.length == NVFP4_LENGTH:
        return {**stored, "dynamic": "local", "strategy": "tensor_group", "scale_dtype": torch.float8_e4m3fn}
    if (blocks.axis, spec.dtype, spec.scale_format, blocks.length) == (-1, FP4, ScaleFormat.E8M0, MXFP4_LENGTH):
        return {**stored, "dynamic": True, "strategy": "group", "scale_dtype": torch.uint8, "zp_dtype": torch.uint8}
    raise Unsuited(f"is an activation of {spec}; servers have nvfp4 with a calibrated scale of the tensor, and mxfp4")


def input_divisor(encoding: Encoding) -> Tensor:
    """``input_global_scale`` of NVFP4 inputs. Shape: [1]."""
    return LARGEST_E4M3 / encoding.scale.cpu().reshape(1)


def cache_arguments(spec: QuantSpec) -> dict[str, object]:
    """Says how keys and values are quantized in a cache: one scale, or one for each head.

    Raises: Unsuited if a checkpoint has no such scales.
    """
    if spec.dynamic:
        raise Unsuited("has a scale for each token, computed at run time, of which a checkpoint has none; write "
                       "kv_cache with granularity: per_tensor or per_head, or export another format")
    if not spec.symmetric or spec.dtype.bits != FP8.bits:
        raise Unsuited(f"has {spec.dtype} codes{'' if spec.symmetric else ' with zero points'}; caches of servers are "
                       "symmetric, fp8_e4m3 or int8")
    strategy = "attn_head" if isinstance(spec.granularity, PerChannel) else "tensor"
    return {**_number_format(spec), "symmetric": True, "dynamic": False, "strategy": strategy}


def _number_format(spec: QuantSpec) -> dict[str, object]:
    if spec.dtype == FP8 or (spec.dtype == FP4 and spec.scale_format in (ScaleFormat.E4M3, ScaleFormat.E8M0)):
        return {"num_bits": spec.dtype.bits, "type": "float"}
    if isinstance(spec.dtype, FloatDtype) or spec.dtype.bits not in BITS:
        raise Unsuited(f"has {spec.dtype} codes")
    if spec.reduced_range:
        raise Unsuited("has codes -64…64, a range for x86: take reduced_range out of its setting")
    return {"num_bits": spec.dtype.bits, "type": "int"}


def signed_shift(spec: QuantSpec) -> int:
    """The number by which codes are lowered to be stored signed: 0 for a signed format."""
    return 0 if spec.dtype.signed else 1 << (spec.dtype.bits - 1)


def scale_matrices(scale: Tensor, spec: QuantSpec, axes: MatrixAxes, shape: Sequence[int]) -> Tensor:
    """Scales, or zero points, of a weight for each matrix, output and block of inputs.

    Shape: ``scale`` the qparam shape of ``shape``; result [matrices, outputs, blocks], of length 1 where all share one.

    Raises: Unsuited if outputs or inputs are counted by several axes.
    """
    if len(axes.outputs) != 1 or len(axes.columns) != 1 or axes.parts != 1:
        raise Unsuited("has outputs or inputs along several axes")
    if isinstance(spec.granularity, PerTensor):
        return scale.reshape(1, 1, 1)
    sizes = spec.granularity.block_size(len(shape))
    counts = [1 if size == WHOLE else length // size for length, size in zip(shape, sizes, strict=True)]
    matrices = scale.reshape(counts).permute(*axes.stack, *axes.outputs, *axes.columns)
    return matrices.reshape(-1, *matrices.shape[-2:])


def global_scale(scale: Tensor) -> Tensor:
    """The divisor of NVFP4 scales: ``scale ≈ e4m3 / divisor``, the inverse of the scale of the tensor.

    Shape: ``scale`` any; result [1], float32.

    Raises: Unsuited if the scales are no E4M3 numbers times one float32 scale.
    """
    unit = tensor_scale_of(scale)
    if unit is None:
        raise Unsuited("has scales that are no E4M3 numbers times one scale of the tensor")
    return (1.0 / unit).reshape(1)
