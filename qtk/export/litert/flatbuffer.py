"""Reads and changes the tables of a ``.tflite`` file by the schema of the package ai-edge-litert."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qtk.errors import ExportError, first_line
from qtk.export.litert.library import SIGNATURE, schema

IDENTIFIER = b"TFL3"

DTYPES = {
    "FLOAT32": torch.float32, "FLOAT16": torch.float16, "INT8": torch.int8, "UINT8": torch.uint8, "INT16": torch.int16,
    "INT32": torch.int32, "INT64": torch.int64, "BOOL": torch.bool,
}
"""Name of a tensor type in the schema → dtype; tensors of other types are not read."""

QUANTIZE, DEQUANTIZE = "QUANTIZE", "DEQUANTIZE"


@dataclass(frozen=True, slots=True, eq=False)
class LiteRtTensor:
    """A tensor of a file.

    Args:
        index: its number in the file's main graph.
        name: its name, which the converter makes.
        kind: name of its type in the schema: ``INT8``.
        shape: its shape in the file, channels last where an operator wants that.
        scale: scales, [1] per tensor or [channels]; ``None`` if it is not quantized.
        zero_point: int64, of the shape of ``scale``.
        axis: the axis of the channels; 0 per tensor.
        is_constant: whether the file holds its values.
    """

    index: int
    name: str
    kind: str
    shape: tuple[int, ...]
    scale: Tensor | None
    zero_point: Tensor | None
    axis: int
    is_constant: bool


@dataclass(frozen=True, slots=True, eq=False)
class LiteRtOp:
    """An operator of a file.

    Args:
        kind: its name in the schema: ``CONV_2D``.
        inputs: indices of the tensors that it reads; an operand that is left out is missing.
        outputs: indices of the tensors that it writes.
    """

    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class LiteRtModel:
    """The main graph of a file.

    Args:
        content: the bytes of the file.
        name: what errors call it.

    Raises: ExportError if ai-edge-litert is not installed, or it is no such file.
    """

    def __init__(self, content: bytes, name: str = "the file") -> None:
        self._schema = schema()
        try:
            if content[4:8] != IDENTIFIER:
                raise ValueError(f"it has no identifier {IDENTIFIER.decode()}")
            self._model = self._schema.ModelT.InitFromObj(self._schema.Model.GetRootAs(content, 0))
        except Exception as error:
            raise ExportError(f"cannot read {name} as a .tflite file: {first_line(error)}; name one that sim.export "
                              "wrote") from error
        self._types = _names(self._schema.TensorType)
        self._graph = self._model.subgraphs[0]

    @classmethod
    def load(cls, path: Path) -> LiteRtModel:
        """The model in a file."""
        return cls(path.read_bytes(), str(path))

    @property
    def tensors(self) -> list[LiteRtTensor]:
        """All tensors, by index."""
        return [self._tensor(index) for index in range(len(self._graph.tensors))]

    @property
    def ops(self) -> list[LiteRtOp]:
        """All operators, in the order in which they run."""
        kinds = _names(self._schema.BuiltinOperator)
        codes = [kinds[max(code.builtinCode, code.deprecatedBuiltinCode)] for code in self._model.operatorCodes]
        return [LiteRtOp(codes[op.opcodeIndex], _indices(op.inputs), _indices(op.outputs))
                for op in self._graph.operators]

    @property
    def inputs(self) -> dict[str, int]:
        """Name → index of its tensor, of every input, in order."""
        return self._by_name("inputs")

    @property
    def outputs(self) -> dict[str, int]:
        """Name → index of its tensor, of every output, in order."""
        return self._by_name("outputs")

    @property
    def metadata(self) -> dict[str, bytes]:
        """The texts that the file carries beside its graph, by name."""
        return {each.name.decode(): self._bytes(each.buffer) for each in self._model.metadata or ()}

    def values(self, tensor: LiteRtTensor) -> Tensor:
        """The stored values of a constant, in its shape in the file."""
        data = self._bytes(self._graph.tensors[tensor.index].buffer)
        return torch.frombuffer(bytearray(data), dtype=DTYPES[tensor.kind]).reshape(tensor.shape)

    def set_metadata(self, values: Mapping[str, bytes]) -> None:
        """Adds texts, or replaces them."""
        entries = {each.name.decode(): each for each in self._model.metadata or ()}
        for name, value in values.items():
            if name not in entries:
                entries[name] = self._schema.MetadataT()
                entries[name].name, entries[name].buffer = name.encode(), len(self._model.buffers)
                self._model.buffers.append(self._schema.BufferT())
            self._model.buffers[entries[name].buffer].data = list(value)
        self._model.metadata = [*entries.values()]

    def take_codes(self) -> None:
        """Leaves out the operators that quantize inputs and dequantize outputs: the file takes and returns codes.

        An input that something else reads in float, and an output that is not dequantized, stay as they are.
        """
        ops = self.ops
        returned = {*self.outputs.values()}
        readers: dict[int, list[int]] = {}
        for position, op in enumerate(ops):
            for index in op.inputs:
                readers.setdefault(index, []).append(position)
        replaced, dropped = {}, set()
        for index in self.inputs.values():
            reading = readers.get(index, [])
            if len(reading) == 1 and ops[reading[0]].kind == QUANTIZE and index not in returned:
                replaced[index] = ops[reading[0]].outputs[0]
                dropped.add(reading[0])
        for position, op in enumerate(ops):
            if op.kind == DEQUANTIZE and op.outputs[0] in returned and op.outputs[0] not in readers:
                replaced[op.outputs[0]] = op.inputs[0]
                dropped.add(position)
        graph = self._graph
        graph.operators = [op for position, op in enumerate(graph.operators) if position not in dropped]
        graph.inputs, graph.outputs = ([replaced.get(int(index), int(index)) for index in each]
                                       for each in (graph.inputs, graph.outputs))
        for signature in self._model.signatureDefs:
            for tensor in (*signature.inputs, *signature.outputs):
                tensor.tensorIndex = replaced.get(tensor.tensorIndex, tensor.tensorIndex)

    def to_bytes(self) -> bytes:
        """The file."""
        import flatbuffers  # with ai-edge-litert

        builder = flatbuffers.Builder(1024)
        builder.Finish(self._model.Pack(builder), file_identifier=IDENTIFIER)
        return bytes(builder.Output())

    def _by_name(self, side: str) -> dict[str, int]:
        for signature in self._model.signatureDefs or ():
            if signature.signatureKey.decode() == SIGNATURE:
                named = {each.name.decode(): int(each.tensorIndex) for each in getattr(signature, side)}
                order = _indices(getattr(self._graph, side))
                return dict(sorted(named.items(), key=lambda item: order.index(item[1])))
        return {self.tensors[index].name: index for index in _indices(getattr(self._graph, side))}

    def _bytes(self, buffer: int) -> bytes:
        data = self._model.buffers[buffer].data
        return b"" if data is None else bytes(bytearray(data))

    def _tensor(self, index: int) -> LiteRtTensor:
        tensor = self._graph.tensors[index]
        given = tensor.quantization
        scale = zero_point = None
        if given is not None and given.scale is not None and len(given.scale):
            scale = torch.tensor([float(each) for each in given.scale], dtype=torch.float32)
            zero_point = torch.tensor([int(each) for each in given.zeroPoint], dtype=torch.int64)
        data = self._model.buffers[tensor.buffer].data
        return LiteRtTensor(
            index, tensor.name.decode(), self._types[tensor.type], _indices(tensor.shape), scale, zero_point,
            given.quantizedDimension if given is not None else 0, data is not None and len(data) > 0,
        )


def _indices(values: Any) -> tuple[int, ...]:
    return tuple(int(value) for value in (() if values is None else values) if int(value) >= 0)


def _names(kind: type) -> dict[int, str]:
    """Number → name, of an enumeration of the schema."""
    return {value: name for name, value in vars(kind).items() if isinstance(value, int)}
