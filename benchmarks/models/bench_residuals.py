"""Latency in ONNX Runtime with residual streams in 8 bits and in float, target ``onnxruntime``, batch 1.

Medians of interleaved turns in one process.

    python benchmarks/models/bench_residuals.py
    python benchmarks/models/bench_residuals.py --models digits_vit --turns 1000
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from accuracy_of_residuals import build, without_streams

import qtk
from qtk.config.load import load_config
from qtk.demo.models import DEMO_MODELS
from qtk.demo.models import build as build_demo
from qtk.runtimes.session import create_session


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=("digits_vit", "vit_tiny_patch16_224"))
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="the smallest model, to see that the script runs")
    arguments = parser.parse_args()
    config = load_config("onnxruntime")
    for name in ("digits_vit",) if arguments.quick else arguments.models:
        is_demo = name in DEMO_MODELS
        model = build_demo(name) if is_demo else build(name)
        x = torch.rand(1, 1, 8, 8) if is_demo else torch.randn(1, *model.default_cfg["input_size"])
        sessions = {}
        with tempfile.TemporaryDirectory() as folder:
            for kind, variant in (("8 bits", without_streams(config)), ("float", config)):
                sim = qtk.QuantSim(model, x, config=variant)
                sim.compute_encodings([x], progress=False)
                sim.export(Path(folder) / kind, formats=["onnx"])
                sessions[kind] = create_session(Path(folder) / kind / "model.onnx", threads=arguments.threads)[0]
        times_ms: dict[str, list[float]] = {kind: [] for kind in sessions}
        for _ in range(arguments.turns + 2):
            for kind, session in sessions.items():
                feed = {session.get_inputs()[0].name: x.numpy()}
                started = time.perf_counter()
                session.run(None, feed)
                times_ms[kind].append((time.perf_counter() - started) * 1000)
        medians = {kind: statistics.median(times[2:]) for kind, times in times_ms.items()}
        print(name, *(f"stream in {kind}: {median:.3f} ms" for kind, median in medians.items()),
              f"ratio {medians['float'] / medians['8 bits']:.3f}")


if __name__ == "__main__":
    main()
