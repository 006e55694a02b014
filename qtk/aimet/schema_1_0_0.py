"""AIMET's schema 1.0.0: ``offset`` is the lowest code less the zero point, blocks are flat and without an axis.

``is_sym`` is not read: AIMET (2.42) writes true where the zero point happens to be in the middle. Offsets decide.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qtk.aimet import lpbq
from qtk.aimet.fields import (
    NamedEncoding,
    Record,
    block_axis,
    check_fields,
    is_lpbq,
    offset_of,
    zero_point_of,
)
from qtk.core.dtypes import FloatDtype
from qtk.core.granularity import WHOLE, PerBlock, PerChannel, PerTensor, PerToken, PerTokenBlock, Shape
from qtk.core.spec import QuantSpec
from qtk.errors import EncodingError, ExportError
from qtk.export.encodings_json import numbers

LPBQ = "LPBQ"
ENC_TYPES = {PerTensor: "PER_TENSOR", PerChannel: "PER_CHANNEL", PerBlock: "PER_BLOCK"}


def record(tensor: NamedEncoding) -> Record:
    """The record of a tensor. Raises: ExportError if the schema cannot hold its format or blocks."""
    encoding, spec = tensor.encoding, tensor.encoding.spec
    if isinstance(spec.dtype, FloatDtype):
        raise ExportError(f"AIMET's schema 1.0.0 holds no {spec.dtype}; schema 2.0.0 holds small floats")
    head = {"name": tensor.name, "dtype": "INT", "enc_type": enc_type(spec), "bw": stored_bits(spec)}
    if is_lpbq(spec):
        integers, channel_scale = lpbq.split(encoding.scale, lpbq.channel_axis(spec))
        return {
            **head, "is_sym": True, "scale": channel_scale.flatten().tolist(),
            "offset": [-(1 << (stored_bits(spec) - 1))] * channel_scale.numel(),
            "block_size": _block_size(spec), "compressed_bw": spec.dtype.bits,
            "per_block_int_scale": integers.flatten().tolist(),
        }
    return {
        **head, "is_sym": spec.symmetric, "scale": encoding.scale.flatten().tolist(),
        "offset": offset_of(encoding).flatten().tolist(),
        **({"block_size": _block_size(spec)} if isinstance(spec.granularity, PerBlock) else {}),
    }


def decode(record: Record, spec: QuantSpec, shape: Shape | None) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point of a record for a site of this spec and shape.

    Raises: EncodingError, ExportError if the record does not fit; RuntimeError if its numbers are too few or many.
    """
    expected: dict[str, object] = {"dtype": "INT", "enc_type": enc_type(spec), "bw": stored_bits(spec)}
    is_block = isinstance(spec.granularity, PerBlock)
    if is_block:
        expected["block_size"] = _block_size(spec)
    if is_lpbq(spec):
        expected["compressed_bw"] = spec.dtype.bits
    check_fields(record, expected, spec)
    scale = numbers(record.get("scale"), torch.float32)
    offset = numbers(record.get("offset"), torch.int64)
    if not is_block:
        return scale, zero_point_of(offset.reshape(scale.shape), spec)
    if shape is None:
        raise EncodingError("schema 1.0.0 does not store the shape of blocks; pass the tensor's in shapes")
    counts = spec.granularity.qparam_shape(shape)
    if is_lpbq(spec):
        axis = lpbq.channel_axis(spec)
        integers = numbers(record.get("per_block_int_scale"), torch.int32).reshape(counts)
        one_each = [count if index == axis else 1 for index, count in enumerate(counts)]
        return lpbq.joined(integers, scale.reshape(one_each)), None
    return scale.reshape(counts), zero_point_of(offset.reshape(counts), spec)


def enc_type(spec: QuantSpec) -> str:
    """The name of a granularity. Raises: ExportError for dynamic quantization, which has no encoding."""
    if isinstance(spec.granularity, PerToken | PerTokenBlock):
        raise ExportError("AIMET's schemas hold no dynamic quantization")
    return LPBQ if is_lpbq(spec) else ENC_TYPES[type(spec.granularity)]


def _block_size(spec: QuantSpec) -> int:
    """Raises: ExportError if readers could not tell which axis it is along."""
    assert isinstance(spec.granularity, PerBlock)
    sizes = spec.granularity.sizes
    if sizes.count(WHOLE) == 1 and all(size in (1, WHOLE) for size in sizes):
        raise ExportError(f"AIMET's schema 1.0.0 stores no axis, and blocks {sizes} span a whole axis, as of stacked "
                          "matrices; schema 2.0.0 holds them")
    return block_axis(spec, None)[1]


def stored_bits(spec: QuantSpec) -> int:
    """The width in the field ``bw``: of a code, and of LPBQ of a code times an integer scale."""
    return spec.dtype.bits + (lpbq.SCALE_BITS if is_lpbq(spec) else 0)
