"""Runs exported files in OpenVINO on the CPU."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qtk.errors import ExportError
from qtk.export.onnx.names import op_of
from qtk.report.runtime_nodes import FloatNode, RuntimeNodes

if TYPE_CHECKING:
    import openvino

WEIGHTED = ("Convolution", "Deconvolution", "FullyConnected", "MatMul", "LSTMSequence", "GRUSequence", "RNNSeq")
COMPUTING = (*WEIGHTED, "Eltwise", "Math", "MVN", "Softmax", "Pooling", "Reduce", "Subgraph", "RoPE",
             "ScaledAttn", "Interpolate", "NormalizeL2")
"""Kinds of nodes that compute; the others move or convert values. Weighted ones also run in integers, Eltwise too."""

INTEGERS = ("u8", "i8", "u4", "i4", "i32")


def has_openvino() -> bool:
    """Says whether OpenVINO is installed."""
    return importlib.util.find_spec("openvino") is not None


class OpenVinoModel:
    """A file compiled for the CPU, in float32 where it is not quantized: OpenVINO may choose bfloat16 by itself.

    Args:
        file: an ONNX file.
        threads: the CPU threads of a run; 0 leaves the number to OpenVINO.

    Raises: ExportError if OpenVINO is not installed or does not compile the file.
    """

    def __init__(self, file: Path, *, threads: int = 0) -> None:
        if not has_openvino():
            raise ExportError("running a file in OpenVINO needs openvino; run: pip install \"qtk[openvino]\"")
        import openvino

        self.runtime = f"OpenVINO {openvino.__version__.partition('-')[0]}"
        try:
            core = openvino.Core()
            self.compiled: openvino.CompiledModel = core.compile_model(
                core.read_model(str(file)), "CPU",
                {"INFERENCE_PRECISION_HINT": "f32", **({"INFERENCE_NUM_THREADS": threads} if threads else {})},
            )
        except Exception as error:
            raise ExportError(f"{file}: {self.runtime} cannot compile it: {str(error).strip()}") from error
        self._request = self.compiled.create_infer_request()

    def run(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """The outputs, in order. Raises: ExportError if it does not run on these inputs."""
        names = {name for port in self.compiled.inputs for name in port.get_names()}
        feed = {name: tensor.detach().cpu().numpy() for name, tensor in inputs.items() if name in names}
        try:
            results = self._request.infer(feed)
        except Exception as error:
            raise ExportError(f"{self.runtime} cannot run the file: {str(error).strip()}") from error
        return [torch.from_numpy(results[port].copy()) for port in self.compiled.outputs]

    def nodes(self) -> RuntimeNodes:
        """Returns what it executes, by the precision that each node runs in."""
        integer: Counter[str] = Counter()
        floats = []
        for node in self.compiled.get_runtime_model().get_ordered_ops():
            record = node.get_rt_info()
            kind, precision, names = (
                str(record[key].astype(str)) for key in ("layerType", "runtimePrecision", "originalLayersNames")
            )
            if kind not in COMPUTING:
                continue
            inputs = [value.get_element_type().get_type_name() for value in node.inputs()]
            if kind in WEIGHTED and inputs and inputs[0] not in INTEGERS:  # codes of weights, that it dequantizes
                precision = inputs[0]
            if precision in INTEGERS:
                integer[kind] += 1
            else:
                op = op_of(names.split(",")[0]) or node.get_friendly_name()
                floats.append(FloatNode(kind, op, f"OpenVINO runs it in {precision}", kind in WEIGHTED))
        return RuntimeNodes(dict(integer), tuple(floats))
