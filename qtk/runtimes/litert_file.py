"""Runs ``.tflite`` files in LiteRT on the CPU: by XNNPACK, as it comes, or by its reference kernels."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qtk.errors import ExportError, first_line
from qtk.export.litert.file import file_sites
from qtk.export.litert.flatbuffer import DEQUANTIZE, DTYPES, QUANTIZE, LiteRtModel, LiteRtOp
from qtk.export.litert.library import INSTALL
from qtk.report.runtime_nodes import FloatNode, RuntimeNodes

PACKAGE = "ai_edge_litert"

WEIGHTED = frozenset(("CONV_2D", "DEPTHWISE_CONV_2D", "CONV_3D", "TRANSPOSE_CONV", "FULLY_CONNECTED", "BATCH_MATMUL",
                      "UNIDIRECTIONAL_SEQUENCE_LSTM", "BIDIRECTIONAL_SEQUENCE_LSTM", "UNIDIRECTIONAL_SEQUENCE_RNN"))
"""Kinds that multiply and add up."""

MOVING = frozenset((
    QUANTIZE, DEQUANTIZE, "RESHAPE", "TRANSPOSE", "SLICE", "STRIDED_SLICE", "SPLIT", "SPLIT_V", "CONCATENATION", "PACK",
    "UNPACK", "PAD", "PADV2", "MIRROR_PAD", "GATHER", "GATHER_ND", "EMBEDDING_LOOKUP", "EXPAND_DIMS", "SQUEEZE", "TILE",
    "BROADCAST_TO", "REVERSE_V2", "CAST", "SELECT", "SELECT_V2", "WHERE", "SPACE_TO_DEPTH", "DEPTH_TO_SPACE", "SHAPE",
    "FILL", "RANGE", "SPACE_TO_BATCH_ND", "BATCH_TO_SPACE_ND", "MAX_POOL_2D", "DYNAMIC_UPDATE_SLICE", "SCATTER_ND",
    "STABLEHLO_COMPOSITE", "WHILE", "IF", "CALL", "CALL_ONCE", "VAR_HANDLE", "READ_VARIABLE", "ASSIGN_VARIABLE",
))
"""Kinds that move, choose or convert values, and kinds around other graphs."""

REFERENCE = "reference kernels"


class LiteRtFile:
    """A ``.tflite`` file, loaded. A call of more rows than the file has is several calls.

    Args:
        file: the file.
        reasons: name of a site that is not quantized → why.
        threads: threads of a run; 0 leaves the number to LiteRT.
        reference: run LiteRT's reference kernels, which microcontrollers have too and which return the sites' values.

    Raises: ExportError if ai-edge-litert is not installed, or does not load the file.
    """

    def __init__(
        self, file: Path, reasons: Mapping[str, str], *, threads: int = 0, reference: bool = False
    ) -> None:
        try:
            from ai_edge_litert import interpreter
        except ImportError as error:
            raise ExportError(f"running a .tflite file needs the package ai-edge-litert, {error.name} is missing; "
                              f"{INSTALL}") from error
        self._reasons = reasons
        self._model = LiteRtModel.load(file)
        name = f"LiteRT {version('ai-edge-litert')}"
        self.runtime = f"{name}, {REFERENCE}" if reference else f"{name}, XNNPACK"
        self._inputs, self._outputs = self._model.inputs, self._model.outputs
        kinds = interpreter.OpResolverType
        try:
            self._interpreter: Any = interpreter.Interpreter(
                model_path=str(file), num_threads=threads or None, experimental_preserve_all_tensors=reference,
                experimental_op_resolver_type=kinds.BUILTIN_REF if reference else kinds.BUILTIN,
            )
            self._interpreter.allocate_tensors()
        except Exception as error:
            raise ExportError(f"{file}: {self.runtime} does not load it: {first_line(error)}") from error
        self._tensors = self._model.tensors
        self._sites = {site.name: site.tensor.index for site in file_sites(self._model)
                       if not site.tensor.is_constant} if reference else {}

    @property
    def inputs(self) -> Sequence[str]:
        return [*self._inputs]

    @property
    def outputs(self) -> Sequence[str]:
        return [*self._outputs]

    @property
    def sites(self) -> Sequence[str]:
        return [*self._sites]

    def run(self, inputs: Mapping[str, Tensor], *, sites: bool = False) -> dict[str, Tensor]:
        """Outputs by name, and sites if asked, with a first axis of calls."""
        wanted = self._outputs | (self._sites if sites else {})
        returned: dict[str, list[Tensor]] = {name: [] for name in wanted}
        for feed in self._calls(inputs):
            self._invoke(feed)
            for name, index in wanted.items():
                returned[name].append(self._reals(index))
        return {name: torch.stack(values) for name, values in returned.items()}

    def timed(self, inputs: Mapping[str, Tensor]) -> Callable[[], object]:
        calls = self._calls(inputs)

        def run() -> None:
            for feed in calls:
                self._invoke(feed)

        return run

    def _invoke(self, feed: Mapping[int, np.ndarray[Any, Any]]) -> None:
        for index, value in feed.items():
            self._interpreter.set_tensor(index, value)
        self._interpreter.invoke()

    def _calls(self, inputs: Mapping[str, Tensor]) -> list[dict[int, np.ndarray[Any, Any]]]:
        """Returns what each call takes, by index of the tensor: a row of the inputs that have more
        rows than the file.
        """
        feed = {index: inputs[name].detach().cpu() for name, index in self._inputs.items()}
        axes = {index: _batch_axis(value, self._tensors[index].shape) for index, value in feed.items()}
        calls = max((feed[index].shape[axis] for index, axis in axes.items() if axis is not None), default=1)
        return [{index: self._stored(index, value if (axis := axes[index]) is None else value.narrow(axis, call, 1))
                 for index, value in feed.items()} for call in range(calls)]

    def nodes(self) -> RuntimeNodes:
        """The file's operators by what they write: codes, or floats."""
        integer: Counter[str] = Counter()
        floats = []
        for op in self._model.ops:
            written = self._tensors[op.outputs[0]]
            if op.kind in MOVING or written.kind in ("BOOL", "INT64"):
                continue
            if written.kind == "FLOAT32":
                floats.append(self._float_node(op, written.name))
            elif written.scale is not None:
                integer[op.kind] += 1
        return RuntimeNodes(dict(integer), tuple(floats))

    def _float_node(self, op: LiteRtOp, name: str) -> FloatNode:
        site = re.split(";+", name)[0]
        made = site.rpartition(":")[0] or site
        reason = self._reasons.get(site)
        if reason is None:
            read = [self._tensors[index] for index in op.inputs]
            is_part = not any(each.scale is not None for each in read)
            reason = "part of an op that LiteRT writes as several" if is_part else "an operand is in float"
        return FloatNode(op.kind, made, reason, op.kind in WEIGHTED)

    def _stored(self, index: int, value: Tensor) -> np.ndarray[Any, Any]:
        """A value as the file takes it: floats as codes, where an input is codes."""
        tensor = self._tensors[index]
        if tensor.scale is not None and tensor.zero_point is not None and value.is_floating_point():
            limits = torch.iinfo(DTYPES[tensor.kind])
            value = (torch.round(value / tensor.scale) + tensor.zero_point).clamp(limits.min, limits.max)
        return np.ascontiguousarray(value.to(DTYPES[tensor.kind]).numpy())

    def _reals(self, index: int) -> Tensor:
        tensor, value = self._tensors[index], torch.from_numpy(np.array(self._interpreter.get_tensor(index)))
        if tensor.scale is None or tensor.zero_point is None:
            return value
        return (value.to(torch.int32) - tensor.zero_point.to(torch.int32)) * tensor.scale


def _batch_axis(value: Tensor, shape: Sequence[int]) -> int | None:
    """The axis along which a value has more rows than an input of the file; ``None`` if it is as long."""
    lengths = zip(value.shape, shape, strict=True)
    return next((axis for axis, (given, held) in enumerate(lengths) if given != held), None)
