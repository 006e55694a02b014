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

CONVERTING = frozenset(("QuantizeLinear", "DequantizeLinear"))


def computing_ms(file: Path, inputs: Sequence[Tensor], *, turns: int) -> float:
    """The time of all kernels in one run but those that quantize and dequantize: the sum of their medians.

    Args:
        file: an ONNX file.
        inputs: its inputs, in order.
        turns: how often it runs; once more before, which does not count, warms up.
    """
    with tempfile.TemporaryDirectory(prefix="qtk-") as folder:
        session = profiling_session(file, Path(folder) / "profile")
        arrays = {value.name: tensor.numpy() for value, tensor in zip(session.get_inputs(), inputs, strict=True)}
        for _ in range(turns + 1):
            session.run(None, arrays)
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    times: dict[str, list[float]] = defaultdict(list)
    for event in events:
        kind = event.get("args", {}).get("op_name")
        if event["name"].endswith("_kernel_time") and kind not in CONVERTING:
            times[event["name"]].append(event["dur"] / 1000)
    return sum(statistics.median(each[len(each) // (turns + 1):]) for each in times.values())
