"""How long the ops of a model take in one run of its file in ONNX Runtime."""

from __future__ import annotations

import statistics
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from qtk.runtimes.executed_nodes import ops_of_nodes
from qtk.runtimes.kernel_times import kernel_times


def op_times(
    file: Path, inputs: Mapping[str, Tensor], *, turns: int, threads: int = 0
) -> dict[str, list[tuple[str, float]]]:
    """The time of each op of the model in one run: the kind and the median in ms of each node that computes it.

    A node that quantizes or dequantizes the value of a site belongs to the op that makes the value.

    Args:
        file: an exported file, with Q/DQ or in float.
        inputs: its inputs, by name.
        turns: how often it runs; once more before, which does not count, warms up.
        threads: threads within an op; 0 leaves the number to ONNX Runtime.

    Raises: whatever ONNX Runtime raises for a file that it does not run.
    """
    ops: dict[str, list[tuple[str, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="qtk-") as folder:
        optimized = Path(folder) / "optimized.onnx"
        kernels = kernel_times(file, lambda _: inputs, turns, threads, optimized)
        names = ops_of_nodes(optimized, file)
    for (kernel, kind), times in kernels.items():
        calls = len(times) // (turns + 1)  # more than one in a loop
        ops[names.get(kernel, kernel)].append((kind, calls * statistics.median(times[calls:])))
    return dict(ops)
