"""Export of a quantized LSTM: time, nodes and latency in ONNX Runtime, against the float model's one operator a layer.

The time of export is that of ``qdq.export`` against ``torch.onnx.export`` of the float model. Latencies are medians,
and minima, of interleaved turns at batch 1. The profile is ONNX Runtime's own, of the first size: microseconds an
inference, of which ``Scan`` contains the others in its body.

    python benchmarks/models/bench_recurrent.py
    python benchmarks/models/bench_recurrent.py --sizes 64 --turns 10
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from torch import fx, nn

import qtk
from qtk.export.onnx import qdq
from qtk.runtimes.session import create_session

INPUTS, LENGTH = 64, 32
INSIDE_FLOAT = {"version": 1, "rules": [{"match": {"op": "lstm"}, "inside": "float"}]}


def operators(graph: onnx.GraphProto) -> Counter[str]:
    """How often each operator occurs, subgraphs included."""
    counts: Counter[str] = Counter()
    for node in graph.node:
        counts[node.op_type] += 1
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                counts += operators(attribute.g)
    return counts


def exported(folder: Path, hidden: int) -> tuple[dict[str, Path], dict[str, float]]:
    """Writes the float model and both quantized ones. Returns: their files, and the seconds of each export."""
    torch.manual_seed(0)
    model = nn.LSTM(INPUTS, hidden, 2).eval()
    x = torch.randn(LENGTH, 1, INPUTS)
    files = {name: folder / f"{name}{hidden}.onnx" for name in ("float", "default", "inside float")}
    seconds = {}
    start = time.perf_counter()
    program = torch.onnx.export(model, (x,), dynamo=True, verbose=False)
    seconds["float"] = time.perf_counter() - start
    assert program is not None
    program.save(files["float"])
    for name, config in (("default", "default"), ("inside float", INSIDE_FLOAT)):
        sim = qtk.QuantSim(model, (x,), config=config)
        sim.compute_encodings([(torch.randn(LENGTH, 1, INPUTS),) for _ in range(4)], progress=False)
        start = time.perf_counter()
        assert isinstance(sim.model, fx.GraphModule)
        qdq.export(sim.model, (x,), files[name])
        seconds[name] = time.perf_counter() - start
        check(sim, files[name])
    return files, seconds


def check(sim: qtk.QuantSim, file: Path) -> None:
    """No speed of a file that computes something else."""
    x = torch.randn(LENGTH, 1, INPUTS)
    session, _ = create_session(file, optimized=False, threads=1)
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    with torch.no_grad():
        expected = sim.model(x)[0].numpy()
    assert (np.abs(found - expected) > 1e-5).mean() <= 0.001


def latencies(files: dict[str, Path], turns: int, threads: int) -> dict[str, list[float]]:
    """Milliseconds of each turn, in turns of all files."""
    x = np.random.default_rng(0).standard_normal((LENGTH, 1, INPUTS), dtype=np.float32)
    sessions = {name: create_session(file, threads=threads)[0] for name, file in files.items()}
    elapsed: dict[str, list[float]] = {name: [] for name in files}
    for turn in range(turns + 5):
        for name, session in sessions.items():
            start = time.perf_counter()
            session.run(None, {session.get_inputs()[0].name: x})
            if turn >= 5:
                elapsed[name].append((time.perf_counter() - start) * 1e3)
    return elapsed


def profile(file: Path, folder: Path, threads: int, runs: int = 20) -> list[tuple[str, tuple[float, float]]]:
    """Operator → microseconds (the median call times their number) and calls an inference, the dearest first."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.enable_profiling = threads, True
    options.profile_file_prefix, options.log_severity_level = str(folder / "profile"), 3
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    x = np.zeros((LENGTH, 1, INPUTS), dtype=np.float32)
    for _ in range(runs):
        session.run(None, {session.get_inputs()[0].name: x})
    durations: dict[str, list[float]] = {}
    for event in json.loads(Path(session.end_profiling()).read_text()):
        if event.get("cat") == "Node" and event["name"].endswith("kernel_time"):
            durations.setdefault(event["args"]["op_name"], []).append(event["dur"])
    costs = {name: (statistics.median(each) * len(each) / runs, len(each) / runs) for name, each in durations.items()}
    return sorted(costs.items(), key=lambda item: -item[1][0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 512, 1024], help="hidden sizes")
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for hidden in arguments.sizes:
            files, seconds = exported(folder, hidden)
            elapsed = latencies(files, arguments.turns, arguments.threads)
            print(f"\nLSTM({INPUTS} → {hidden}, 2 layers), T = {LENGTH}, batch 1")
            for kind, file in files.items():
                nodes = sum(operators(onnx.load(file).graph).values())
                print(f"  {kind:<13} export {seconds[kind]:5.1f} s  {nodes:4d} nodes  {file.stat().st_size:>11,} bytes "
                      f" latency {statistics.median(elapsed[kind]):6.2f} ms, at best {min(elapsed[kind]):6.2f}")
        print(f"\nprofile of default, {arguments.sizes[0]}:")
        for kind, (total, calls) in profile(folder / f"default{arguments.sizes[0]}.onnx", folder, arguments.threads):
            print(f"  {kind:<22} {total:6.0f} us in {calls:3.0f} calls")


if __name__ == "__main__":
    main()
