"""What stands for a quantizer in an exported program: the ops of ``quantized_decomposed``, or plain ATen.

A site of integers, per tensor or per channel, has the ops; stored integers in groups along a matrix's rows too. Other
stored numbers are plain ATen: ``(codes − zero point) · scale``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.fx.traceback import annotate

from qtk.core.dtypes import INT32, FloatDtype
from qtk.core.encoding import Encoding
from qtk.core.granularity import PerBlock, PerChannel, PerTensor
from qtk.core.spec import QuantSpec
from qtk.graph.sites import SITE
from qtk.nn.tap import Tap
from qtk.numerics.blocks import align, split_shape
from qtk.numerics.codes import codes_of, storage_dtype
from qtk.torch_private import load_decomposed_ops

SPEC = "qtk_spec"
"""Label of the ops of a site in an exported program, beside ``SITE``: its spec, as JSON."""

class ComputedSite(Tap):
    """Quantizes and dequantizes a value. Shape: any of ``rank`` axes, of a floating dtype; result as the value."""

    idle = False

    def __init__(self, site: str, encoding: Encoding, rank: int) -> None:
        super().__init__()
        self.labels = _labels(site, encoding.spec)
        self.ops = _Ops(encoding, (0,) * rank)

    def forward(self, value: Tensor) -> Tensor:
        with annotate(self.labels):
            real = self.ops.dequantized(self.ops.quantized(_cast(value, torch.float32)))
            return _cast(real, value.dtype)


class StoredSite(Tap):
    """Dequantizes the codes of a constant. Shape: no input; result as the constant."""

    idle = False
    codes: Tensor

    def __init__(self, site: str, encoding: Encoding, constant: Tensor) -> None:
        super().__init__()
        self.labels = _labels(site, encoding.spec)
        self.dtype = constant.dtype
        self.register_buffer("codes", codes_of(constant, encoding))
        with_ops = has_ops(encoding.spec, constant.shape)
        self.ops = _Ops(encoding, constant.shape) if with_ops else _Plain(encoding, constant.shape)

    def forward(self) -> Tensor:
        with annotate(self.labels):
            return _cast(self.ops.dequantized(self.codes), self.dtype)


class UnfoldedSite(Tap):
    """Quantizes and dequantizes the real values of a constant, which the program holds in float.

    LiteRT's converter looks for both ops and makes the codes itself. It also makes the codes of int32 biases, in the
    scale of the products that they are added to, from values without ops.

    Shape: no input; result as the constant.
    """

    idle = False
    reals: Tensor

    def __init__(self, site: str, encoding: Encoding, constant: Tensor) -> None:
        super().__init__()
        self.labels = _labels(site, encoding.spec)
        self.dtype = constant.dtype
        dequantize = _Plain(encoding, constant.shape).dequantized
        with_ops = has_ops(encoding.spec, constant.shape) and encoding.spec.dtype != INT32
        self.ops = _Ops(encoding, constant.shape) if with_ops else None
        self.register_buffer("reals", dequantize(codes_of(constant, encoding)))

    def forward(self) -> Tensor:
        if self.ops is None:
            return _cast(self.reals, self.dtype)
        with annotate(self.labels):
            return _cast(self.ops.dequantized(self.ops.quantized(self.reals)), self.dtype)


class _Ops(nn.Module):
    """The two ops of an encoding; its numbers are literals per tensor, else buffers."""

    def __init__(self, encoding: Encoding, shape: Sequence[int]) -> None:
        super().__init__()
        load_decomposed_ops()
        spec = encoding.spec
        self.limits = int(spec.qmin) + spec.middle_code, int(spec.qmax) + spec.middle_code, storage_dtype(spec)
        self.before: tuple[int, ...] = ()
        self.after: tuple[object, ...] = ()
        match spec.granularity:
            case PerTensor():
                self.kind = "per_tensor"
                self.literals = float(encoding.scale), int(_zero_point(encoding))
                return
            case PerChannel() as channel:
                self.kind, self.before = "per_channel", (channel.axis_of(len(shape)),)
            case _:
                self.kind, self.after = "per_channel_group", (shape[1] // encoding.scale.shape[1], torch.float32)
        self.register_buffer("scale", encoding.scale)
        self.register_buffer("zero_point", _zero_point(encoding))

    def quantized(self, value: Tensor) -> Tensor:
        return self._call(f"quantize_{self.kind}", value)

    def dequantized(self, codes: Tensor) -> Tensor:
        return self._call(f"dequantize_{self.kind}", codes, *self.after)

    def _call(self, name: str, value: Tensor, *after: object) -> Tensor:
        numbers = self.literals if self.kind == "per_tensor" else (self.scale, self.zero_point)
        op = getattr(torch.ops.quantized_decomposed, name).default
        result: Tensor = op(value, *numbers, *self.before, *self.limits, *after)
        return result


class _Plain(nn.Module):
    """Dequantization in ATen."""

    scale: Tensor
    zero_point: Tensor

    def __init__(self, encoding: Encoding, shape: Sequence[int]) -> None:
        super().__init__()
        self.block_size = encoding.spec.granularity.block_size(len(shape))
        self.register_buffer("scale", encoding.scale)
        self.register_buffer("zero_point", _zero_point(encoding))

    def dequantized(self, codes: Tensor) -> Tensor:
        scale, zero_point = (align(each, codes.shape, self.block_size) for each in (self.scale, self.zero_point))
        reals = codes.to(torch.float32).reshape(split_shape(codes.shape, self.block_size)[0])
        return ((reals - zero_point) * scale).reshape(codes.shape)


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    """``value`` as ``dtype``; an exported program would hold a cast that changes nothing."""
    return value if value.dtype == dtype else value.to(dtype)


def _labels(site: str, spec: QuantSpec) -> dict[str, str]:
    return {SITE: site, SPEC: json.dumps(spec.to_json())}


def has_ops(spec: QuantSpec, stored_shape: Sequence[int] | None) -> bool:
    """Says whether ``quantized_decomposed`` has ops for a spec.

    Args:
        spec: how a value is quantized.
        stored_shape: shape of a constant; ``None`` for a value that is computed.
    """
    if spec.dynamic or isinstance(spec.dtype, FloatDtype):
        return False
    subtracts = storage_dtype(spec) is not torch.uint16  # torch (seen in 2.15) has no uint16 minus int64
    match spec.granularity:
        case PerTensor():
            return True
        case PerChannel():
            return subtracts
        case PerBlock((1, group)) if subtracts and stored_shape is not None and len(stored_shape) == 2:
            return group > 1 or (group == -1 and stored_shape[1] > 1)
    return False


def _zero_point(encoding: Encoding) -> Tensor:
    """Zero points of the stored codes, int64 as torch's own tools write them. Shape: as the scale."""
    if encoding.zero_point is not None:
        return encoding.zero_point.to(torch.int64)
    return torch.full_like(encoding.scale, encoding.spec.middle_code, dtype=torch.int64)
