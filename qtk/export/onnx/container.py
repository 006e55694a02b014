"""Which ONNX type stores the codes of a format."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from qtk.core.dtypes import DTYPES, FloatDtype, QDtype
from qtk.core.spec import QuantSpec
from qtk.errors import ExportError

BASE_OPSET = 21
"""The first with 4 and 16 bit QuantizeLinear, and with blocks."""

TWO_BIT_OPSET = 25
"""The first with 2 bit QuantizeLinear."""

_BITS = (2, 4, 8, 16)
_FLOATS = {"fp8_e4m3": ir.DataType.FLOAT8E4M3FN, "fp8_e5m2": ir.DataType.FLOAT8E5M2}


def opset_for(weights: Iterable[QuantSpec], activations: Iterable[QuantSpec]) -> int:
    """21, or 25 for a model of which weights alone are quantized, some to 2 bits.

    Next to quantized activations 2 bit weights are stored as 4 bit ones: there ONNX Runtime (seen in 1.31, with its
    default optimizations) fuses them into integer operators that know no 2 bit type, and then refuses the model.

    >>> from qtk.core.dtypes import dtype
    >>> weight = QuantSpec(dtype("int2"), symmetric=True)
    >>> opset_for([weight], []), opset_for([weight], [QuantSpec(dtype("uint8"))])
    (25, 21)
    """
    packed = not list(activations) and any(spec.dtype.bits == 2 for spec in weights)
    return TWO_BIT_OPSET if packed else BASE_OPSET


def container(dtype: QDtype, *, opset: int) -> ir.DataType:
    """The narrowest ONNX type of this opset and signedness that holds every code.

    >>> from qtk.core.dtypes import dtype
    >>> container(dtype("uint6"), opset=21).name, container(dtype("int2"), opset=21).name
    ('UINT8', 'INT4')

    Raises: ExportError for a float that QuantizeLinear of this opset does not know.
    """
    if isinstance(dtype, FloatDtype):
        if dtype.name not in _FLOATS:
            raise ExportError(f"ONNX QuantizeLinear of opset {opset} knows {' and '.join(_FLOATS)}, not {dtype}; "
                              'plan one of these, or export formats=("encodings",)')
        return _FLOATS[dtype.name]
    bits = next(bits for bits in _BITS if bits >= dtype.bits and (bits > 2 or opset >= TWO_BIT_OPSET))
    return ir.DataType[f"{'INT' if dtype.signed else 'UINT'}{bits}"]


def limits(kind: ir.DataType) -> tuple[float, float]:
    """Lowest and highest code of a container.

    >>> limits(ir.DataType.INT4), limits(ir.DataType.FLOAT8E4M3FN)
    ((-8, 7), (-448.0, 448.0))
    """
    for name, own in _FLOATS.items():
        if kind == own:
            return DTYPES[name].minimum, DTYPES[name].maximum
    bits = int(kind.itemsize * 8)
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if kind.is_signed() else (0, (1 << bits) - 1)
