"""Peak memory (RSS) of each step from a big float model to its files, as a multiple of the model's size.

    python benchmarks/models/bench_big_model.py --megabytes 1500
    python benchmarks/models/bench_big_model.py --large          # one case of which the ONNX file has data above 2 GB

The model is a stack of transformer blocks with random weights; every case runs in a process of its own, whose own peak
(VmHWM, reset before each step) is read. The simulation is made in place: a copy would be the model's size once more.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, HEADS, TOKENS = 1024, 16, 8
MEGABYTE = 2**20
LARGE = 2600
"""Size of the model whose file is above 2 GB, as all but one block stay in float."""

CONFIGS = {
    "W4 in blocks": {"version": 1, "extends": "default", "defaults": {
        "weight": {"dtype": "int4", "granularity": "per_block", "block_size": 128}, "activation": "float"}},
    "W8A8": {"version": 1, "extends": "onnxruntime"},
    "first block W8A8": {"version": 1, "extends": "onnxruntime", "exclude": ["[1-9]*"]},
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.project(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def model_of(megabytes: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    blocks = max(1, round(megabytes * MEGABYTE / (4 * 12 * width**2)))
    return nn.Sequential(*(Block(width) for _ in range(blocks))).eval()


def memory() -> tuple[float, float]:
    """Resident bytes now, and their peak since the last reset, in MB."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return tuple(int(lines[key].split()[0]) / 1024 for key in ("VmRSS", "VmHWM"))  # type: ignore[return-value]


def step(name: str, run: Callable[[], Any]) -> Any:
    """Runs a step and prints its figures as a line of JSON."""
    Path("/proc/self/clear_refs").write_text("5")
    started = time.perf_counter()
    result = run()
    now, peak = memory()
    print(json.dumps({"step": name, "peak": peak, "after": now, "seconds": time.perf_counter() - started}), flush=True)
    return result


def child(case: str, output: str, megabytes: int, width: int, folder: Path) -> None:
    import qtk
    if output == "onnx":
        import onnxruntime  # noqa: F401  what an export imports is no memory of the model

        import qtk.export.onnx.qdq
    x = torch.randn(2, TOKENS, width)
    model = step("float model", lambda: model_of(megabytes, width))
    size = sum(each.numel() * each.element_size() for each in model.parameters()) / MEGABYTE
    print(json.dumps({"step": "size", "peak": size, "after": size, "seconds": 0.0}))
    prepared = step("prepare", lambda: qtk.prepare_model(model, x))
    sim = step("QuantSim", lambda: qtk.QuantSim(prepared, x, config=CONFIGS[case], in_place=True))
    step("calibrate", lambda: sim.compute_encodings([x], progress=False))
    if output == "integer":
        step("save", lambda: sim.save(folder / "out", weights="integer"))
    else:
        step(f"export {output}", lambda: sim.export(folder / "out", formats=(output,)))
    files = sum(path.stat().st_size for path in (folder / "out").iterdir()) / MEGABYTE
    print(json.dumps({"step": "files", "peak": files, "after": files, "seconds": 0.0}))
    if megabytes == LARGE:
        run_file(folder / "out", sim, x)


def run_file(folder: Path, sim: object, x: Tensor) -> None:
    """Loads the file in ONNX Runtime and compares it with the simulation, which is freed first."""
    from qtk.runtimes.session import create_session

    with torch.no_grad():
        expected = sim.model(x)  # type: ignore[attr-defined]
    session, _ = step("load", lambda: create_session(folder / "model.onnx"))
    (output,) = step("run", lambda: session.run(None, {session.get_inputs()[0].name: x.numpy()}))
    error = (torch.from_numpy(output) - expected).abs().max() / expected.abs().max()
    print(json.dumps({"step": f"largest difference {float(error):.1e}", "peak": 0, "after": 0, "seconds": 0.0}))


def measured(case: str, output: str, megabytes: int, width: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--child", case, output, folder, "--megabytes", str(megabytes), "--width",
                   str(width)]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(f"{case}, {output}: failed with {done.returncode}\n{done.stderr[-3000:]}")
        return
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    size = next(row["peak"] for row in rows if row["step"] == "size")
    whole = max(row["peak"] for row in rows if row["step"] not in ("load", "run"))
    print(f"\n{case}, {output}: {size:.0f} MB of float32, peak {whole:.0f} MB = {whole / size:.2f} x")
    for row in rows:
        if row["step"] != "size":
            print(f"  {row['step']:<28} peak {row['peak']:>7.0f} MB {row['peak'] / size:>5.2f} x   after "
                  f"{row['after']:>7.0f} MB {row['seconds']:>6.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=300)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--cases", nargs="*", default=["W4 in blocks", "W8A8"], choices=CONFIGS)
    parser.add_argument("--outputs", nargs="*", default=["onnx", "pt2e", "integer"])
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--child", nargs=3)
    arguments = parser.parse_args()
    if arguments.child:
        case, output, folder = arguments.child
        child(case, output, arguments.megabytes, arguments.width, Path(folder))
    elif arguments.large:
        measured("first block W8A8", "onnx", LARGE, 2048)
    else:
        for case in arguments.cases:
            for output in arguments.outputs:
                measured(case, output, arguments.megabytes, arguments.width)


if __name__ == "__main__":
    main()
