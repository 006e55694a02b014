"""AIMET's schema 2.0.0: names and conventions of ONNX QuantizeLinear; a zero point of 0 everywhere is left out."""

from __future__ import annotations

import torch
from torch import Tensor

from qtk.aimet import lpbq
from qtk.aimet.fields import (
    NamedEncoding,
    Record,
    block_axis,
    check_fields,
    checked_zero_point,
    is_lpbq,
    stored_zero_point,
)
from qtk.core.dtypes import FloatDtype
from qtk.core.granularity import PerBlock, PerChannel, PerTensor, Shape
from qtk.core.spec import QuantSpec
from qtk.errors import ExportError
from qtk.export.encodings_json import numbers

FLOATS = {"fp8_e4m3": "float8e4m3fn", "fp8_e5m2": "float8e5m2", "fp4_e2m1": "float4e2m1"}


def record(tensor: NamedEncoding) -> Record:
    """The record of a tensor. Raises: ExportError if the schema cannot hold its format or blocks."""
    encoding, spec = tensor.encoding, tensor.encoding.spec
    scale, zero_point = encoding.scale, stored_zero_point(encoding)
    place = _place(spec, tensor.shape)
    head = {"name": tensor.name, "output_dtype": _output_dtype(spec)}
    if is_lpbq(spec):
        integers, channel_scale = lpbq.split(scale, lpbq.channel_axis(spec))
        return {**head, "per_block_int_scale": integers.tolist(), "per_channel_float_scale": channel_scale.tolist(),
                **place}
    if isinstance(spec.granularity, PerTensor):
        scale, zero_point = scale.reshape(()), zero_point.reshape(())
    shifted = {"y_zero_point": zero_point.tolist()} if bool(zero_point.any()) else {}
    return {**head, "y_scale": scale.tolist(), **shifted, **place}


def decode(record: Record, spec: QuantSpec, shape: Shape | None) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point of a record for a site of this spec and shape.

    Raises: EncodingError, ExportError if the record does not fit; RuntimeError if its numbers are too few or many.
    """
    expected: dict[str, object] = {"axis": None, "block_size": None, **_place(spec, shape)}
    check_fields(record, {"output_dtype": _output_dtype(spec), **expected}, spec)
    if is_lpbq(spec):
        integers = numbers(record.get("per_block_int_scale"), torch.int32)
        return lpbq.joined(integers, numbers(record.get("per_channel_float_scale"), torch.float32)), None
    scale = numbers(record.get("y_scale"), torch.float32)
    if isinstance(spec.granularity, PerTensor):
        scale = scale.reshape(1)
    stored = record.get("y_zero_point")
    zero_point = torch.zeros_like(scale, dtype=torch.int32) if stored is None else numbers(stored, torch.int32)
    return scale, checked_zero_point(zero_point.reshape(scale.shape), spec)


def _place(spec: QuantSpec, shape: Shape | None) -> dict[str, object]:
    """The fields ``axis`` and ``block_size``."""
    match spec.granularity:
        case PerChannel(axis):
            return {"axis": axis}
        case PerBlock():
            axis, size = block_axis(spec, shape)
            return {"axis": axis, "block_size": size}
    return {}


def _output_dtype(spec: QuantSpec) -> str:
    """The name of the format."""
    if not isinstance(spec.dtype, FloatDtype):
        return spec.dtype.name
    if spec.dtype.name not in FLOATS:
        raise ExportError(f"AIMET's schemas hold {', '.join(FLOATS)}, but not {spec.dtype}; plan one of these, or take "
                          "qtk's own encodings.json")
    return FLOATS[spec.dtype.name]
