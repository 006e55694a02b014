"""How long ONNX Runtime's kernels take in one run of a file."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from qtk.export.onnx.session import profiling_session


def computing_ms(file: Path, inputs: Sequence[Tensor], *, turns: int) -> float:
    """The time of all kernels in one run but those that quantize, and dequantize outputs: the sum of their medians.

    In a larger model an operator before or behind takes these along. What is dequantized inside is what this model
    computes in float.

    Args:
        file: an ONNX file.
        inputs: its inputs, in order.
        turns: how often it runs; once more before, which does not count, warms up.
    """
    with tempfile.TemporaryDirectory(prefix="qtk-") as folder:
        outputs = _dequantize_outputs(file)
        session = profiling_session(file, Path(folder) / "profile")
        arrays = {value.name: tensor.numpy() for value, tensor in zip(session.get_inputs(), inputs, strict=True)}
        for _ in range(turns + 1):
            session.run(None, arrays)
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    times: dict[str, list[float]] = defaultdict(list)
    for event in events:
        kernel, kind = event["name"].removesuffix("_kernel_time"), event.get("args", {}).get("op_name")
        if kernel != event["name"] and kind != "QuantizeLinear" and kernel not in outputs:
            times[kernel].append(event["dur"] / 1000)
    return sum(statistics.median(each[len(each) // (turns + 1):]) for each in times.values())


def _dequantize_outputs(file: Path) -> set[str]:
    """The names of the nodes whose floats leave the model."""
    import onnx  # an extra: loaded where it is needed

    graph = onnx.load(file, load_external_data=False).graph
    outputs = {value.name for value in graph.output}
    return {node.name for node in graph.node
            if node.op_type == "DequantizeLinear" and not outputs.isdisjoint(node.output)}
