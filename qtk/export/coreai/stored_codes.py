"""Reads what the program of an ``.aimodel`` file dequantizes: scales, zero points, and the codes of constants."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qtk.errors import ExportError

CONSTANT, DEQUANTIZE = "coreai.constant", "coreai.dequantize"

BLOB = re.compile(r'^\s*(\w+): "0x([0-9A-Fa-f]*)"', re.MULTILINE)
ALIGNMENT_BYTES = 4
"""Stand in front of a blob's values."""

ELEMENTS = {"si8": np.int8, "ui8": np.uint8, "f32": np.float32}
"""Name of an element type → how it is stored."""


@dataclass(frozen=True, slots=True, eq=False)
class DequantizedValue:
    """What an operator dequantizes.

    Args:
        scale: float32, [1] per tensor or [channels].
        zero_point: int32, as ``scale``.
        codes: the integers of a constant; ``None``: they are computed.
    """

    scale: Tensor
    zero_point: Tensor
    codes: Tensor | None


class StoredCodes:
    """The operators of a file that dequantize, in order.

    Args:
        program: the file's program, as coreai-core has it.
    """

    def __init__(self, program: Any) -> None:
        self._program = program  # holds the operators
        self._module: Any = attrgetter("_module._mlir_module")(program)  # coreai-core has no other way to them

    @property
    def values(self) -> list[DequantizedValue]:
        """Raises: ExportError if a scale or a zero point is no constant."""
        return [self._value(op) for op in _operations(self._module.operation) if op.name == DEQUANTIZE]

    def _value(self, op: Any) -> DequantizedValue:
        codes, scale, zero_point = (self._constant(op.operands[index]) for index in range(3))
        if scale is None or zero_point is None:
            raise ExportError(f"an operator {op.name} of the file computes its scale; export the simulation again")
        scale, zero_point = (each.reshape(each.shape or (1,)) for each in (scale, zero_point))
        return DequantizedValue(scale, zero_point.to(torch.int32), codes)

    def _constant(self, value: Any) -> Tensor | None:
        """The values of a constant; ``None`` for what is computed."""
        owner: Any = getattr(value, "owner", None)
        if getattr(owner, "name", None) != CONSTANT:
            return None
        stored = owner.attributes["value"]
        element, shape = str(value.type.element_type), tuple(value.type.shape)
        if element not in ELEMENTS:
            raise ExportError(f"a constant of {element} in the file cannot be read; export the simulation again")
        blob = re.match(r"dense_resource<(\w+)>", str(stored)[:200])
        array = np.array(stored) if blob is None else np.frombuffer(self._blobs[blob[1]], ELEMENTS[element])
        values = torch.from_numpy(array.copy()).flatten()
        return values.reshape(shape) if len(values) > 1 else values.expand(math.prod(shape)).reshape(shape).clone()

    @cached_property
    def _blobs(self) -> dict[str, bytes]:
        """Name → bytes of the large constants; Core AI prints them, and has no other way to read them."""
        text = str(self._module)
        _, _, resources = text.rpartition("dialect_resources")
        return {name: bytes.fromhex(digits)[ALIGNMENT_BYTES:] for name, digits in BLOB.findall(resources)}


def _operations(operation: Any) -> Iterator[Any]:
    """All operators inside, in order."""
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation
                yield from _operations(inner.operation)
