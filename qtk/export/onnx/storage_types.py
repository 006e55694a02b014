"""The ONNX dtype that stores the codes of a number format, and the lowest opset with that dtype."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from qtk.core.dtypes import DTYPES, INT32, FloatDtype, QDtype
from qtk.core.granularity import PerBlock, PerToken
from qtk.core.spec import QuantSpec
from qtk.errors import ExportError

BASE_OPSET = 19
"""The first opset whose QuantizeLinear has float8, and the lowest that qtk writes."""

BLOCK_OPSET = 21
"""The first opset whose QuantizeLinear has 4 and 16 bits, and blocks."""

TWO_BIT_OPSET = 25
"""The first opset whose QuantizeLinear has 2 bits."""

EIGHT_BITS = (ir.DataType.UINT8, ir.DataType.INT8)

_BITS = (2, 4, 8, 16)
_FLOATS = {"fp8_e4m3": ir.DataType.FLOAT8E4M3FN, "fp8_e5m2": ir.DataType.FLOAT8E5M2}


def opset_for(weights: Iterable[QuantSpec], activations: Iterable[QuantSpec]) -> int:
    """25 for a weight-only model with 2 bit weights, 21 where ``needs_21`` says why, else 19.

    With quantized activations, 2 bit weights are stored as 4 bit ones: ONNX Runtime (seen in 1.31, with its default
    optimizations) would fuse them into integer operators that have no 2 bit type, and refuse the model.

    >>> from qtk.core.dtypes import dtype
    >>> int2, uint8 = QuantSpec(dtype("int2"), symmetric=True), QuantSpec(dtype("uint8"))
    >>> opset_for([int2], []), opset_for([int2], [uint8]), opset_for([uint8], [uint8])
    (25, 21, 19)
    """
    weights, activations = list(weights), list(activations)
    if not activations and any(spec.dtype.bits == 2 for spec in weights):
        return TWO_BIT_OPSET
    stored = any(needs_21(spec, stored=True) for spec in weights)
    return BLOCK_OPSET if stored or any(needs_21(spec, stored=False) for spec in activations) else BASE_OPSET


def needs_21(spec: QuantSpec, *, stored: bool) -> str | None:
    """Returns what of a spec QuantizeLinear has since opset 21 only; ``None`` if 19 has it all.

    Args:
        spec: how a value is quantized.
        stored: whether its codes are in the file, and not computed at run time.

    >>> from qtk.core.dtypes import dtype
    >>> int4 = QuantSpec(dtype("int4"), symmetric=True)
    >>> needs_21(int4, stored=True), needs_21(int4, stored=False)
    ('int4 codes', None)
    """
    if isinstance(spec.granularity, PerBlock):
        return "scales in blocks"
    if isinstance(spec.granularity, PerToken):
        return "scales per token"
    fits = range(5 if stored else 1, 9)
    if not isinstance(spec.dtype, FloatDtype) and spec.dtype != INT32 and spec.dtype.bits not in fits:
        return f"{spec.dtype} codes"
    return None


def storage_type(dtype: QDtype, *, opset: int, stored: bool) -> ir.DataType:
    """The narrowest ONNX type in this opset, of the same signedness, that holds every code.

    Codes that are computed at run time get 8 bits or more: ONNX Runtime (seen in 1.32) fuses QuantizeLinear to 4 bits
    with Clip, Conv and others that have no such type, and then refuses the model.

    >>> from qtk.core.dtypes import dtype
    >>> int2 = dtype("int2")
    >>> storage_type(int2, opset=21, stored=True).name, storage_type(int2, opset=21, stored=False).name
    ('INT4', 'INT8')

    Raises: ExportError for a float format that QuantizeLinear of this opset does not have.
    """
    if isinstance(dtype, FloatDtype):
        if dtype.name not in _FLOATS:
            raise ExportError(f"ONNX QuantizeLinear of opset {opset} has {' and '.join(_FLOATS)}, not {dtype}; "
                              'plan one of these, or export formats=("encodings",)')
        return _FLOATS[dtype.name]
    if dtype == INT32:
        return ir.DataType.INT32
    lowest = 8 if not stored else 2 if opset >= TWO_BIT_OPSET else 4
    bits = next(bits for bits in _BITS if bits >= max(dtype.bits, lowest))
    return ir.DataType[f"{'INT' if dtype.signed else 'UINT'}{bits}"]


def limits(kind: ir.DataType) -> tuple[float, float]:
    """Lowest and highest code of a storage type.

    >>> limits(ir.DataType.INT4), limits(ir.DataType.FLOAT8E4M3FN)
    ((-8, 7), (-448.0, 448.0))
    """
    for name, float_type in _FLOATS.items():
        if kind == float_type:
            return DTYPES[name].minimum, DTYPES[name].maximum
    bits = int(kind.itemsize * 8)
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if kind.is_signed() else (0, (1 << bits) - 1)
