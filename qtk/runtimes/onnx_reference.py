"""An ONNX file as a reference: ONNX Runtime with its optimizations off computes what ONNX defines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from qtk.errors import ExportError, first_line
from qtk.export.onnx.stored_sites import stored_sites
from qtk.runtimes.file_runs import FileRuns
from qtk.runtimes.reference_file import InputTensor

DTYPES = {
    f"tensor({name})": dtype for name, dtype in (
        ("float", torch.float32), ("float16", torch.float16), ("double", torch.float64), ("int64", torch.int64),
        ("int32", torch.int32), ("int16", torch.int16), ("int8", torch.int8), ("uint8", torch.uint8),
        ("bool", torch.bool),
    )
}
"""The type of an input in ONNX Runtime → dtype."""


class OnnxReference:
    """An exported ONNX file. Raises: ExportError if onnxruntime is not installed, or does not load the file."""

    name = "ONNX Runtime, optimizations off"

    def __init__(self, file: Path) -> None:
        try:
            self._runs = FileRuns(file, {})
        except ExportError:
            raise
        except Exception as error:  # whatever the runtime says
            raise ExportError(f"{file}: ONNX Runtime cannot load it: {first_line(error)}") from error
        self.encodings = {site.name: site.encoding for site in stored_sites(file) if site.encoding is not None}
        self.inputs = onnx_inputs(self._runs)
        returned = {site.name: self.encodings.get(site.site) for site in self._runs.off.sites}
        self.output_encodings = [returned.get(name) for name in self._runs.outputs]

    def values(self, inputs: Mapping[str, Tensor]) -> tuple[list[Tensor], dict[tuple[str, int], Tensor]]:
        return self._runs.reference(inputs)


def onnx_inputs(runs: FileRuns) -> list[InputTensor]:
    """The inputs of a file, its states included."""
    return [InputTensor(name, tuple(size if isinstance(size, int) else None for size in shape), DTYPES[kind])
            for name, shape, kind in runs.inputs]
