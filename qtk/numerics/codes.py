"""The codes of a constant by its encoding, as integers or float8 in the smallest dtype that holds them, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from qtk.core.dtypes import INT32, FloatDtype
from qtk.core.encoding import Encoding
from qtk.core.spec import QuantSpec
from qtk.numerics import affine, minifloat
from qtk.numerics.blocks import align, split_shape

_SIGNED, _UNSIGNED = (torch.int8, torch.int16), (torch.uint8, torch.uint16)


def storage_dtype(spec: QuantSpec) -> torch.dtype:
    """The smallest dtype that holds the codes of ``spec``.

    >>> from qtk.core.dtypes import dtype
    >>> storage_dtype(QuantSpec(dtype("int4"), symmetric=True)), storage_dtype(QuantSpec(dtype("uint12")))
    (torch.int8, torch.uint16)
    """
    if isinstance(spec.dtype, FloatDtype):
        return torch.float8_e5m2 if spec.dtype.exponent_bits == 5 else torch.float8_e4m3fn
    if spec.dtype == INT32:
        return torch.int32
    wide = spec.dtype.bits > 8
    return _SIGNED[wide] if spec.dtype.signed else _UNSIGNED[wide]


def codes_of(constant: Tensor, encoding: Encoding) -> Tensor:
    """The codes of a constant, in their storage dtype. Shape: as ``constant``.

    >>> from qtk.core.dtypes import dtype
    >>> codes_of(torch.tensor([0.6, -2.0]), Encoding(QuantSpec(dtype("int4"), symmetric=True), torch.tensor([0.5])))
    tensor([ 1, -4], dtype=torch.int8)
    """
    spec = encoding.spec
    sizes = spec.granularity.block_size(constant.ndim)
    if isinstance(spec.dtype, FloatDtype):
        codes = minifloat.quantize(constant, encoding.scale, sizes, spec.dtype)
    else:
        codes = affine.quantize(constant, encoding.scale, encoding.zero_point, sizes, int(spec.qmin), int(spec.qmax))
        codes = codes.add_(spec.middle_code)
    return codes.to(storage_dtype(spec))


def values_of(codes: Tensor, encoding: Encoding) -> Tensor:
    """What codes dequantize to, float32: the inverse of ``codes_of`` on its results. Shape: as ``codes``.

    Raises: SpecError if the encoding does not fit the shape of ``codes``.

    >>> from qtk.core.dtypes import dtype
    >>> encoding = Encoding(QuantSpec(dtype("int4"), symmetric=True), torch.tensor([0.5]))
    >>> values_of(torch.tensor([1, -4], dtype=torch.int8), encoding)
    tensor([ 0.5000, -2.0000])
    """
    spec = encoding.spec
    sizes = spec.granularity.block_size(codes.ndim)
    if isinstance(spec.dtype, FloatDtype):
        scale = align(encoding.scale, codes.shape, sizes)
        return codes.to(torch.float32).reshape(split_shape(codes.shape, sizes)[0]).mul_(scale).reshape(codes.shape)
    zero_point = encoding.zero_point
    if spec.middle_code:
        zero_point = torch.full_like(encoding.scale, spec.middle_code, dtype=torch.int32)
    return affine.dequantize(codes, encoding.scale, zero_point, sizes)
