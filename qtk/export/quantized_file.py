"""What rules of runtimes are about: the quantized tensors of an exported file, whatever its format, and its ops."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

FileFormat: TypeAlias = Literal["onnx", "pt2e", "encodings"]
TensorRole: TypeAlias = Literal["activations", "weights", "biases", "constants", "caches"]

QUANTIZE, OUTPUT = "quantize", "output"
"""The readers of a value that are no ops: a quantizer, and the output of the file."""


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A quantized tensor.

    Args:
        name: its site, or the node that dequantizes it.
        role: what it is to the ops that read it; ``activations`` are computed at run time, and so are
            ``caches``, keys and values of attention, of which no rule speaks.
        readers: kinds of the ops that read it, directly or through data movement; empty where the format has no ops.
        dtype: its number format, as configs name it.
        granularity: ``per_tensor``, ``per_channel``, ``per_token`` or ``per_block``.
        block_size: length of a block of a tensor in blocks.
        zero_points_are_0: ``None``: they are computed at run time.
        codes: lowest and highest stored code; ``None`` if the file holds none, or an ONNX file computes with floats
            and them alone.
        dynamic: whether its range is computed at run time.
    """

    name: str
    role: TensorRole
    readers: frozenset[str]
    dtype: str
    granularity: str
    block_size: int | None = None
    zero_points_are_0: bool | None = None
    codes: tuple[int, int] | None = None
    dynamic: bool = False


@dataclass(slots=True, eq=False)
class FileOp:
    """An op, quantizers and data movement left out.

    Args:
        name: of its node.
        operator: what the format calls it: ``Conv``, ``aten.conv2d.default``.
        kinds: what configs call it; the narrower name first.
        operands: for each value that it computes with, constants in float and biases aside, whether it is quantized.
        readers: what reads its result, data movement left out: ops, ``QUANTIZE`` and ``OUTPUT``.
    """

    name: str
    operator: str
    kinds: tuple[str, ...]
    operands: tuple[bool, ...] = ()
    readers: list[FileOp | str] = field(default_factory=list)

    def is_any_of(self, kinds: Collection[str]) -> bool:
        """Says whether one of its kinds is among ``kinds``."""
        return not set(kinds).isdisjoint(self.kinds)


@dataclass(frozen=True, slots=True)
class QuantizedFile:
    """A file.

    Args:
        format: the export format.
        target: the target it was exported for; ``None`` if it does not say.
        opset: its ONNX operator set.
        tensors: the quantized tensors.
        ops: the ops; empty where the format has none.
    """

    format: FileFormat
    target: str | None
    opset: int | None
    tensors: tuple[FileTensor, ...]
    ops: tuple[FileOp, ...] = ()

    def ops_of(self, kinds: Collection[str]) -> Iterator[FileOp]:
        """The ops of some kinds."""
        return (op for op in self.ops if op.is_any_of(kinds))
