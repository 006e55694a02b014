"""Reads the encodings of many quantizers, waiting for an accelerator once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qtk.core.encoding import Encoding
from qtk.core.transfer import HOST, moved
from qtk.errors import EncodingError
from qtk.quantizers.quantizer import Quantizer


@torch.no_grad()
def read_encodings(quantizers: Sequence[Quantizer]) -> list[Encoding | EncodingError | None]:
    """The encodings of ``quantizers`` on the CPU, of those on the meta device there; errors in place of invalid ones.

    >>> from qtk.core.dtypes import dtype
    >>> from qtk.core.spec import QuantSpec
    >>> read_encodings([Quantizer(QuantSpec(dtype("int8"), symmetric=True), site="fc.weight")])
    [None]
    """
    ranges = [quantizer.range() for quantizer in quantizers]
    given = [tensor for each in ranges for tensor in each if tensor is not None and not tensor.is_meta]
    read = dict(zip(map(id, given), moved(given, HOST), strict=True))
    results: list[Encoding | EncodingError | None] = []
    for quantizer, (scale, zero_point) in zip(quantizers, ranges, strict=True):
        try:
            results.append(quantizer.encoding_of(*(read.get(id(each), each) for each in (scale, zero_point))))
        except EncodingError as error:
            results.append(error)
    return results
