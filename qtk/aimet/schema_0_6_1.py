"""AIMET's schema 0.6.1: a list of records a tensor, one for each channel; no blocks.

As in 1.0.0, ``offset`` is the lowest code less the zero point, and ``is_symmetric`` is not read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qtk.aimet.fields import NamedEncoding, Record, check_fields, offset_of, zero_point_of
from qtk.core.dtypes import FloatDtype
from qtk.core.granularity import PerBlock, PerTensor, Shape
from qtk.core.spec import QuantSpec
from qtk.errors import EncodingError, ExportError
from qtk.export.encodings_json import numbers


def records(tensor: NamedEncoding) -> list[Record]:
    """The records of a tensor. Raises: ExportError if the schema cannot hold its format or blocks."""
    encoding, spec = tensor.encoding, tensor.encoding.spec
    if isinstance(spec.dtype, FloatDtype):
        raise ExportError(f"AIMET's schema 0.6.1 holds no {spec.dtype}; schema 2.0.0 holds small floats")
    if isinstance(spec.granularity, PerBlock):
        raise ExportError(f"AIMET's schema 0.6.1 holds no blocks, as {spec.granularity}; schemas 1.0.0 and 2.0.0 do")
    steps = (1 << spec.dtype.bits) - 1
    return [
        {
            "bitwidth": spec.dtype.bits, "dtype": "int", "is_symmetric": str(spec.symmetric),
            "min": scale * offset, "max": scale * (offset + steps), "offset": offset, "scale": scale,
        }
        for scale, offset in zip(encoding.scale.tolist(), offset_of(encoding).tolist(), strict=True)
    ]


def decode(records: object, spec: QuantSpec, shape: Shape | None) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point of the records of a site of this spec.

    Raises: EncodingError if they do not fit.
    """
    if not isinstance(records, list) or not records or not all(isinstance(each, dict) for each in records):
        raise EncodingError(f"needs a list of records, got {records!r:.120}")
    if isinstance(spec.granularity, PerBlock):
        raise EncodingError(f"the site is planned as {spec}, and schema 0.6.1 holds no blocks; use a file of schema "
                            "1.0.0 or 2.0.0")
    if isinstance(spec.granularity, PerTensor) and len(records) != 1:
        raise EncodingError(f"it has {len(records)} scales, but the site is planned as {spec}, which needs one; plan "
                            "the site like the file")
    expected = {"dtype": "int", "bitwidth": spec.dtype.bits}
    for each in records:
        check_fields(each, expected, spec)
    scale = numbers([each.get("scale") for each in records], torch.float32)
    return scale, zero_point_of(numbers([each.get("offset") for each in records], torch.int64), spec)
