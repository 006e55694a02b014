"""Finds weights whose products with 8-bit inputs ONNX Runtime cannot add up on every CPU.

x86 without VNNI multiplies uint8 by int8, and adds the products of two neighbours along the summed axis in int16,
which saturates: 255 · (127 + 127) = 64,770 becomes 32,767. A pair of codes of one sign is exact for any input if they
add up to no more than 128, in magnitude; one of both signs always is. Inputs of int8 become uint8 first, by adding 128
(ONNX Runtime 1.32, on x86, behind a QuantizeLinear), so that zeros are large. ARM, and x86 with VNNI, add in int32;
uint8 weights are exact everywhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

import onnx_ir as ir
import torch
from torch import Tensor

from qtk.core.dtypes import FloatDtype
from qtk.core.spec import QuantSpec
from qtk.export.onnx.onnxruntime.moved_codes import FOLLOWED
from qtk.export.onnx.stored_sites import FileSite, numbers_in, stored_sites

SUMS = range(-(2**15), 2**15)
"""What the sum of two products is held in."""

SHIFT = 128
"""What makes int8 codes uint8."""

FACTORS = {"Conv": (0, 1), "Gemm": (0, 1), "MatMul": (0, 1), "QLinearMatMul": (0, 3)}
"""Operators that ONNX Runtime computes in integers → the places of what they multiply, the weight last."""

SIGNED_AS_STORED = ("QLinearMatMul",)
"""Operators that multiply int8 codes as they are where the file holds them; ONNX Runtime's own kernel adds exactly."""

MOVING = (*FOLLOWED, "Flatten", "Split", "Gather", "Expand", "Cast", "Pad")
"""Operators that ONNX Runtime, or the export, lets move codes between a DequantizeLinear and a product."""


def saturating_weights(file: str | os.PathLike[str]) -> list[str]:
    """The sites of the int8 weights of a file with a pair of codes whose products with their input can overflow int16.

    Raises: ExportError if the file is not ONNX, or holds a DequantizeLinear that qtk did not write.
    """
    return list(dict.fromkeys(site.name for site in _saturating_sites(file)))


def saturating_codes(file: str | os.PathLike[str]) -> set[str]:
    """The initializers that hold the codes of ``saturating_weights``. Raises: ExportError as that one."""
    return {codes.name for site in _saturating_sites(file) if (codes := site.node.inputs[0]) is not None and codes.name}


def largest_pair(codes: Tensor) -> int:
    """The largest magnitude of a sum of two neighbours of one sign, or of one number beside one of the other sign.

    Shape: ``codes`` [..., summed].

    >>> largest_pair(torch.tensor([[100, -100, -29, 64, 64]]))
    129
    """
    codes = torch.nn.functional.pad(codes, (0, 1))  # the last one may stand alone
    pairs = [part[..., 1:] + part[..., :-1] for part in (codes.clamp(min=0), -codes.clamp(max=0))]
    return max(int(pair.max()) for pair in pairs) if codes[..., 1:].numel() else 0


def _saturating_sites(file: str | os.PathLike[str]) -> list[FileSite]:
    sites = {site.node: site for site in stored_sites(file)}
    specs = {node: site.spec for node, site in sites.items()}
    return [site for site in sites.values() if _saturates(site, specs)]


def _saturates(site: FileSite, specs: Mapping[ir.Node, QuantSpec]) -> bool:
    codes = site.node.inputs[0]
    if codes is None or codes.const_value is None or not _is_integer_of_8_bits(site.spec) or not site.spec.dtype.signed:
        return False
    stored = torch.from_numpy(numbers_in(codes.const_value, "int32"))
    products = (*_products(codes, stored), *_products(site.node.outputs[0], stored))
    return any(largest_pair(_in_order(product, moved)) * _highest(product, specs) not in SUMS
               for product, moved in products)


def _products(value: ir.Value, codes: Tensor) -> Iterator[tuple[ir.Node, Tensor]]:
    """The products whose weight is ``value``, possibly moved, and the codes that they read."""
    for reader, index in value.uses():
        if FACTORS.get(reader.op_type, (None, None))[1] == index:
            yield reader, codes
        elif reader.op_type in MOVING and index == 0:
            for result in reader.outputs:
                yield from _products(result, _moved(reader, codes))


def _moved(node: ir.Node, codes: Tensor) -> Tensor:
    """The codes behind an operator that moves them; in the order of their size, where that one is not followed."""
    match node.op_type:
        case "Identity" | "Cast":
            return codes
        case "Transpose" if "perm" in node.attributes and len(node.attributes["perm"].as_ints()) == codes.ndim:
            return codes.permute(*node.attributes["perm"].as_ints())
    return codes.flatten().sort().values


def _in_order(product: ir.Node, codes: Tensor) -> Tensor:
    """The codes with the summed axes last, and in the order of ONNX Runtime's kernels: channels innermost.

    Shape: [..., summed].
    """
    if codes.ndim < 2:
        return codes
    if product.op_type == "Conv":
        return codes.movedim(1, -1).flatten(1)
    transposed = product.attributes.get("transB")
    return codes if transposed is not None and transposed.as_int() else codes.movedim(-2, -1)


def _highest(product: ir.Node, specs: Mapping[ir.Node, QuantSpec]) -> int:
    """The highest uint8 code that an operator multiplies its weight with; 0 if it does not multiply in this way."""
    spec = _spec_of(product.inputs[FACTORS[product.op_type][0]], specs)
    if spec is None or not _is_integer_of_8_bits(spec):
        return 0
    if not spec.dtype.signed:
        return int(spec.dtype.maximum)
    return 0 if product.op_type in SIGNED_AS_STORED else int(spec.dtype.maximum) + SHIFT


def _is_integer_of_8_bits(spec: QuantSpec) -> bool:
    return not isinstance(spec.dtype, FloatDtype) and spec.dtype.bits <= 8


def _spec_of(value: ir.Value | None, specs: Mapping[ir.Node, QuantSpec]) -> QuantSpec | None:
    """The spec that ``value`` is quantized by, possibly moved; ``None`` if it is not."""
    if value is None:
        return None
    producer = value.producer()
    readers = [reader for reader, index in value.uses() if index == 0]
    spec = next((specs[node] for node in (producer, *readers) if node in specs), None)
    moves = producer is not None and producer.op_type in MOVING
    return _spec_of(producer.inputs[0], specs) if spec is None and producer is not None and moves else spec
