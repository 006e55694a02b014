"""AIMET's schema 2.1.0: as 2.0.0, but the scale of LPBQ is itself quantized: integers ``x`` times ``x_scale``."""

from __future__ import annotations

import torch
from torch import Tensor

from qtk.aimet import lpbq, schema_2_0_0
from qtk.aimet.fields import NamedEncoding, Record, is_lpbq
from qtk.core.granularity import Shape
from qtk.core.spec import QuantSpec
from qtk.errors import EncodingError
from qtk.export.encodings_json import numbers


def record(tensor: NamedEncoding) -> Record:
    """The record of a tensor. Raises: ExportError if the schema cannot hold its format or blocks."""
    written, spec = dict(schema_2_0_0.record(tensor)), tensor.encoding.spec
    if not is_lpbq(spec):
        return written
    axis = lpbq.channel_axis(spec)
    integers, channel_scale = lpbq.split(tensor.encoding.scale, axis)
    del written["per_block_int_scale"], written["per_channel_float_scale"]
    return {**written, "y_scale": {"x": integers.tolist(), "x_scale": channel_scale.flatten().tolist(), "axis": axis}}


def decode(record: Record, spec: QuantSpec, shape: Shape | None) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point of a record for a site of this spec and shape.

    Raises: EncodingError, ExportError if the record does not fit; RuntimeError if its numbers are too few or many.
    """
    if not is_lpbq(spec):
        return schema_2_0_0.decode(record, spec, shape)
    match record.get("y_scale"):
        case {"x": list(listed), "x_scale": list(scales), "axis": int(axis)}:
            integers, channel_scale = numbers(listed, torch.int32), numbers(scales, torch.float32)
        case _:
            raise EncodingError(f"y_scale is {record.get('y_scale')!r:.120}, but the site is planned as {spec}, which "
                                "needs x, x_scale and axis; plan the site like the file")
    if not -integers.ndim <= axis < integers.ndim:
        raise EncodingError(f"axis of y_scale is {axis}, and x has {integers.ndim} axes")
    channels = [1] * integers.ndim
    channels[axis] = -1
    split = {"per_block_int_scale": listed, "per_channel_float_scale": channel_scale.reshape(channels).tolist()}
    return schema_2_0_0.decode({**record, **split}, spec, shape)
