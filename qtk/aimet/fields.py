"""What records of all of AIMET's schemas have in common: codes, offsets, blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from qtk.core.encoding import Encoding
from qtk.core.granularity import WHOLE, PerBlock, Shape
from qtk.core.spec import QuantSpec, ScaleFormat
from qtk.errors import EncodingError, ExportError

Record: TypeAlias = Mapping[str, object]


@dataclass(frozen=True, slots=True, eq=False)
class NamedEncoding:
    """The encoding of a tensor of an ONNX graph.

    Args:
        name: name of the tensor.
        encoding: its encoding.
        is_parameter: whether the tensor is a parameter.
        shape: its shape, if that is known; blocks along a whole axis need it.
    """

    name: str
    encoding: Encoding
    is_parameter: bool
    shape: Shape | None = None


def lowest_code(spec: QuantSpec) -> int:
    """The lowest number of the type that holds the codes, used or not.

    >>> from qtk.core.dtypes import INT32, dtype
    >>> [lowest_code(QuantSpec(format, symmetric=True)) for format in (dtype("int8"), dtype("uint8"), INT32)]
    [-128, 0, -2147483648]
    """
    return -(1 << (spec.dtype.bits - 1)) if spec.dtype.signed else 0


def offset_of(encoding: Encoding) -> Tensor:
    """AIMET's offset, the lowest code less the zero point. Shape: as the scale; int64."""
    return lowest_code(encoding.spec) - stored_zero_point(encoding).long()


def zero_point_of(offset: Tensor, spec: QuantSpec) -> Tensor | None:
    """Inverse of ``offset_of``. Raises: EncodingError if the spec is symmetric and the offset is another."""
    return checked_zero_point((lowest_code(spec) - offset.long()).clamp(-2**31, 2**31 - 1).int(), spec)


def stored_zero_point(encoding: Encoding) -> Tensor:
    """The zero point; the middle code for a symmetric spec, which stores none."""
    if encoding.zero_point is not None:
        return encoding.zero_point
    return torch.full_like(encoding.scale, encoding.spec.middle_code, dtype=torch.int32)


def checked_zero_point(zero_point: Tensor, spec: QuantSpec) -> Tensor | None:
    """Inverse of ``stored_zero_point``. Raises: EncodingError if the spec is symmetric and has another one."""
    if not spec.symmetric:
        return zero_point
    if bool((zero_point != spec.middle_code).any()):
        raise EncodingError(f"the zero point is not {spec.middle_code}, but the site is planned as {spec}")
    return None


def check_fields(record: Record, expected: Record, spec: QuantSpec) -> None:
    """Raises: EncodingError naming the first field that contradicts the spec."""
    for key, value in expected.items():
        if record.get(key) != value:
            raise EncodingError(f"{key} is {record.get(key)!r}, but the site is planned as {spec}, "
                                f"which needs {value!r}; plan the site like the file")


def block_axis(spec: QuantSpec, shape: Shape | None) -> tuple[int, int]:
    """The axis that blocks are laid along, and their length on it; every other axis is whole, or has blocks of 1.

    >>> from qtk.core.dtypes import dtype
    >>> block_axis(QuantSpec(dtype("int4"), PerBlock((1, 32)), symmetric=True), (8, 64))
    (1, 32)

    A stack of matrices with a scale for each column of each matrix:

    >>> block_axis(QuantSpec(dtype("int8"), PerBlock((1, -1, 1)), symmetric=True), (4, 64, 16))
    (1, 64)

    Raises: ExportError unless there is exactly one such axis.
    """
    assert isinstance(spec.granularity, PerBlock)
    sizes = spec.granularity.sizes
    cut = [axis for axis, size in enumerate(sizes) if size not in (1, WHOLE)]
    whole = [axis for axis, size in enumerate(sizes) if size == WHOLE]
    if not cut and len(whole) == 1 and shape is not None:
        return whole[0], shape[whole[0]]
    if len(cut) != 1:
        raise ExportError(f"AIMET's schemas hold blocks along exactly one axis, the sizes {sizes} cut {len(cut)}; "
                          "quantize this site per channel, or with blocks like (1, 32)")
    return cut[0], sizes[cut[0]]


def is_lpbq(spec: QuantSpec) -> bool:
    """Says whether block scales are integers times a float for each channel."""
    return spec.scale_format is ScaleFormat.INT4
