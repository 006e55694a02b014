"""Which values lie outside of the range of an encoding, and how much of it they fill."""

from __future__ import annotations

import math

from torch import Tensor

from qtk.core.dtypes import FloatDtype
from qtk.core.encoding import Encoding
from qtk.core.spec import QuantSpec
from qtk.numerics.affine import expand


def in_scales(x: Tensor, encoding: Encoding) -> Tensor:
    """``x / scale``, each value in units of the scale of its own channel or block. Shape: as ``x``."""
    scale = expand(encoding.scale, x.shape, encoding.spec.granularity.block_size(x.ndim))
    return x.float() / scale


def count_clipped(scaled: Tensor, encoding: Encoding) -> int:
    """The number of values, in scales, whose code is cut off: outside of ``[qmin - ½, qmax + ½]``, zero point included.

    Of a small float, above its largest by half the distance of its largest two.

    >>> import torch
    >>> from qtk.core.dtypes import dtype
    >>> encoding = Encoding(QuantSpec(dtype("int4"), symmetric=True), torch.tensor([1.0]))
    >>> count_clipped(torch.tensor([-9.0, -8.4, 7.0, 7.6]), encoding)
    2
    """
    spec = encoding.spec
    low, high = spec.qmin - 0.5, spec.qmax + 0.5
    if isinstance(spec.dtype, FloatDtype):
        exponent = math.frexp(spec.dtype.largest)[1] - 1
        high = spec.dtype.largest + 2.0 ** (exponent - spec.dtype.mantissa_bits - 1)
        low = -high
    if encoding.zero_point is not None:
        zero_point = expand(encoding.zero_point, scaled.shape, spec.granularity.block_size(scaled.ndim))
        scaled = scaled + zero_point
    return int(((scaled < low) | (scaled > high)).sum())


def range_filled(lowest: float, highest: float, spec: QuantSpec) -> float:
    """The extent of values, in scales, as a multiple of the extent of the codes; real 0 counts as one of the values.

    1 if they just fit, above 1 if they are clipped; 0.25 leaves two bits without use.

    >>> from qtk.core.dtypes import dtype
    >>> range_filled(0.0, 127.5, QuantSpec(dtype("uint8"))), range_filled(-252.0, 3.0, QuantSpec(dtype("int8")))
    (0.5, 1.0)
    """
    lowest, highest = min(lowest, 0.0), max(highest, 0.0)
    if spec.symmetric:
        return max(lowest / float(spec.qmin), highest / float(spec.qmax))
    return (highest - lowest) / float(spec.qmax - spec.qmin)
