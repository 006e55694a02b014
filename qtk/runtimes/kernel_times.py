"""How long ONNX Runtime's kernels take in one run of a file."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from qtk.runtimes.session import profiling_session


def computing_ms(file: Path, inputs: Sequence[Tensor], *, turns: int) -> float:
    """The time of all kernels in one run but kernels that quantize, or dequantize outputs: the sum of their medians.

    In a larger model an operator before or behind takes these along. What is dequantized inside is what this model
    computes in float.

    Args:
        file: an ONNX file.
        inputs: its inputs, in order.
        turns: how often it runs; once more before, which does not count, warms up.
    """
    outputs = _dequantize_outputs(file)
    return sum(
        statistics.median(times[len(times) // (turns + 1):]) for (kernel, kind), times in kernel_times(
            file, lambda names: dict(zip(names, inputs, strict=True)), turns, 0).items()
        if kind != "QuantizeLinear" and kernel not in outputs
    )


def kernel_times(
    file: Path, feed: Callable[[list[str]], Mapping[str, Tensor]], turns: int, threads: int,
    optimized_file: Path | None = None,
) -> dict[tuple[str, str], list[float]]:
    """Name of a node and its kind → the time in ms of each of its calls, in ``turns`` runs and one before.

    Args:
        file: an ONNX file.
        feed: the names of its inputs → these.
        turns: how often it runs after the first time.
        threads: threads within an op; 0 leaves the number to ONNX Runtime.
        optimized_file: where the optimized graph is written, with these nodes; ``None``: nowhere.

    Raises: whatever ONNX Runtime raises for a file that it does not run.
    """
    with tempfile.TemporaryDirectory(prefix="qtk-") as folder:
        session = profiling_session(file, Path(folder) / "profile", threads=threads, optimized_file=optimized_file)
        inputs = feed([value.name for value in session.get_inputs()])
        arrays = {name: tensor.detach().cpu().numpy() for name, tensor in inputs.items()}
        for _ in range(turns + 1):
            session.run(None, arrays)
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in events:
        kernel = event["name"].removesuffix("_kernel_time")
        if kernel != event["name"]:
            times[kernel, event.get("args", {}).get("op_name", "")].append(event["dur"] / 1000)
    return times


def _dequantize_outputs(file: Path) -> set[str]:
    """The names of the nodes whose floats leave the model."""
    import onnx  # an extra: loaded where it is needed

    graph = onnx.load(file, load_external_data=False).graph
    outputs = {value.name for value in graph.output}
    return {node.name for node in graph.node
            if node.op_type == "DequantizeLinear" and not outputs.isdisjoint(node.output)}
