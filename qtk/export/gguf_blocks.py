"""The blocks of GGUF's Q4_0, Q4_1 and Q8_0: 32 codes and their float16 scale, from codes that are there already.

    Q4_0  scale, 16 bytes of two codes + 8:     x̂ = scale · code, code -8…7
    Q4_1  scale, minimum, 16 bytes of two codes: x̂ = scale · code + minimum, code 0…15
    Q8_0  scale, 32 bytes:                      x̂ = scale · code, code -128…127

The low half of a byte holds code i, the high half code i + 16. The package gguf finds scales of its own from floats,
and so has no function for this; it reads the blocks back.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from qtk.core.encoding import Encoding
from qtk.core.granularity import PerBlock
from qtk.core.spec import QuantSpec
from qtk.errors import ExportError
from qtk.numerics.codes import codes_of

LENGTH = 32
GgufType: TypeAlias = Literal["Q4_0", "Q4_1", "Q8_0"]
SETTINGS = {
    "Q4_0": "{dtype: int4, granularity: per_block, block_size: 32}",
    "Q4_1": "{dtype: uint4, symmetric: false, granularity: per_block, block_size: 32}",
    "Q8_0": "{dtype: int8, granularity: per_block, block_size: 32}",
}


def gguf_type(spec: QuantSpec) -> GgufType | None:
    """The type whose blocks hold such codes; ``None`` if none does.

    >>> from qtk.core.dtypes import dtype
    >>> gguf_type(QuantSpec(dtype("int4"), PerBlock((1, 32)), symmetric=True))
    'Q4_0'
    """
    if not isinstance(spec.granularity, PerBlock) or spec.granularity.sizes != (1, LENGTH):
        return None
    if spec.scale_format is not None:
        return None
    match spec.dtype.name, spec.symmetric:
        case ("int4", True) | ("uint4", True):
            return "Q4_0"
        case ("int4", False) | ("uint4", False):
            return "Q4_1"
        case ("int8", True) | ("uint8", True):
            return "Q8_0"
    return None


def blocks_of(weight: Tensor, encoding: Encoding) -> Tensor:
    """The bytes of a weight, uint8.

    Shape: ``weight`` [out, in]; result [out, bytes].

    Raises: ExportError if the encoding fits no type, or float16 does not hold its scales.
    """
    kind = gguf_type(encoding.spec)
    if kind is None:
        raise ExportError(f"GGUF has no blocks of {encoding.spec}; use one of {', '.join(SETTINGS.values())}")
    rows = weight.shape[0]
    scale = encoding.scale.cpu().to(torch.float16)
    if not torch.equal(scale.to(torch.float32), encoding.scale.cpu()):
        raise ExportError("GGUF has float16 scales, the simulation others; run qtk.round_scales(sim, torch.float16) "
                          "first")
    codes = codes_of(weight, encoding.to(weight.device)).cpu().to(torch.int16)
    signed = codes - (0 if encoding.spec.dtype.signed else 1 << (encoding.spec.dtype.bits - 1))
    grouped = signed.reshape(rows, -1, LENGTH)
    parts = [scale.reshape(rows, -1, 1).contiguous().view(torch.uint8)]
    if kind == "Q8_0":
        parts.append(grouped.to(torch.int8).view(torch.uint8))
    else:
        if encoding.zero_point is not None:
            middle = 0 if encoding.spec.dtype.signed else 8
            lowest = (-8 - (encoding.zero_point.cpu() - middle)) * encoding.scale.cpu()
            parts.append(lowest.to(torch.float16).reshape(rows, -1, 1).contiguous().view(torch.uint8))
        unsigned = (grouped + 8).to(torch.uint8)
        parts.append(unsigned[..., :LENGTH // 2] | (unsigned[..., LENGTH // 2:] << 4))
    return torch.cat(parts, -1).reshape(rows, -1)
