"""What an ONNX file returns in a runtime, batch by batch; the names by which users ask for one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from qtk.errors import ExportError
from qtk.registry import nearest
from qtk.runtimes.openvino_model import OpenVinoModel
from qtk.runtimes.session import Optimizations, session_with

OPTIMIZATIONS = {"onnxruntime-off": Optimizations.OFF, "onnxruntime-on": Optimizations.ON}

RUNTIMES = (*OPTIMIZATIONS, "openvino")
"""ONNX Runtime without and with its optimizations, and OpenVINO."""


class FileOutputs:
    """An ONNX file that is opened in a runtime.

    Args:
        file: the file.
        runtime: one of ``RUNTIMES``.

    Attributes:
        runtime: its name and version, and how it runs the file.
        inputs: the names of the inputs.

    Raises: ExportError for an unknown runtime or one that is not installed, or if it refuses the file.
    """

    def __init__(self, file: Path, runtime: str) -> None:
        if runtime not in RUNTIMES:
            raise ExportError(f"unknown runtime {runtime!r}; {nearest(runtime, RUNTIMES)}")
        self._compiled, self._session = None, None
        if runtime == "openvino":
            self._compiled = OpenVinoModel(file)
            self.runtime = self._compiled.runtime
            self.inputs = [port.get_any_name() for port in self._compiled.compiled.inputs]
        else:
            self._session, self.runtime = session_with(file, OPTIMIZATIONS[runtime])
            self.inputs = [value.name for value in self._session.get_inputs()]

    def run(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """The outputs, in order. Raises: ExportError if OpenVINO does not run on these inputs."""
        if self._compiled is not None:
            return self._compiled.run(inputs)
        assert self._session is not None
        feed = {name: inputs[name].detach().cpu().numpy() for name in self.inputs}
        return [torch.from_numpy(each) for each in self._session.run(None, feed)]
