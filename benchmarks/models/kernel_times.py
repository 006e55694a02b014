"""How long ONNX Runtime's kernels take, op by op: the rows ``runtime.kernels`` of its targets.

    python benchmarks/models/kernel_times.py [--turns 60] [--threads 1]

Each op is a model of one op at three sizes, exported in float, quantized by the target ``onnxruntime``, and quantized
at run time by ``dynamic``. Times are medians of the profiled kernel that computes; a row is the geometric mean over the
sizes, in picoseconds for a multiplication (products) or an element of the result (others).
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

import qtk
from qtk.report.table import Column, Table
from qtk.runtimes.kernel_times import kernel_times

CONVERSIONS = ("QuantizeLinear", "DequantizeLinear")


class Op(nn.Module):
    """A function of one or two tensors."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, *x: Tensor) -> Tensor:
        match self.name:
            case "add":
                return x[0] + x[1]
            case "mul":
                return x[0] * x[1]
            case "matmul":
                return x[0] @ x[1]
            case "concat":
                return torch.cat(x, 1)
            case "softmax":
                return x[0].softmax(-1)
            case "layer_norm":
                return nn.functional.layer_norm(x[0], x[0].shape[-1:])
            case "avg_pool":
                return nn.functional.adaptive_avg_pool2d(x[0], 1)
            case "interpolate":
                return nn.functional.interpolate(x[0], scale_factor=2.0, mode="bilinear")
        return getattr(torch, self.name, getattr(nn.functional, self.name, None))(x[0])


def cases() -> dict[str, list[tuple[nn.Module, tuple[Tensor, ...]]]]:
    """Op → models at some sizes, and their inputs."""
    images = [(32, 28), (64, 14), (128, 14)]
    found: dict[str, list[tuple[nn.Module, tuple[Tensor, ...]]]] = {
        "conv": [(nn.Conv2d(c, c, 3, padding=1), (torch.randn(1, c, s, s),)) for c, s in images],
        "conv of 1 × 1": [(nn.Conv2d(c, 2 * c, 1), (torch.randn(1, c, s, s),)) for c, s in images],
        "conv, depthwise": [(nn.Conv2d(c, c, 3, padding=1, groups=c), (torch.randn(1, c, s, s),)) for c, s in images],
        "conv_transpose": [(nn.ConvTranspose2d(c, c, 2, 2), (torch.randn(1, c, s, s),)) for c, s in images],
        "linear": [(nn.Linear(c, 2 * c), (torch.randn(1, 64, c),)) for c in (128, 256, 512)],
        "matmul": [(Op("matmul"), (torch.randn(4, n, 64), torch.randn(4, 64, n))) for n in (64, 128, 197)],
    }
    for name in ("add", "mul"):
        found[name] = [(Op(name), tuple(torch.randn(1, c, s, s) for _ in range(2))) for c, s in images]
    found["concat"] = [(Op("concat"), tuple(torch.randn(1, c, s, s) for _ in range(2))) for c, s in images]
    for name in ("relu", "sigmoid", "tanh", "silu", "gelu", "avg_pool", "interpolate"):
        found[name] = [(Op(name), (torch.randn(1, c, s, s),)) for c, s in images]
    for name in ("softmax", "layer_norm"):
        found[name] = [(Op(name), (torch.randn(4, 64, n),)) for n in (64, 128, 197)]
    return found


def picoseconds(
    op: nn.Module, inputs: tuple[Tensor, ...], config: str | None, units: float, arguments: argparse.Namespace
) -> tuple[float | None, dict[str, float]]:
    """The time of the kernels that compute, ``None`` if they compute in float, and for an element, of conversions."""
    bits = None if config is None else 8
    try:
        sim = qtk.QuantSim(op.eval(), inputs, weight_bits=bits, activation_bits=bits, dynamic_shapes=None,
                           config=config or "default")
        sim.compute_encodings([inputs], progress=False)
    except qtk.QtkError:  # nothing of it would be quantized
        return None, {}
    with tempfile.TemporaryDirectory() as folder:
        sim.export(Path(folder) / "op", formats=("onnx",), check=False)
        file = Path(folder) / "op" / "model.onnx"
        found = kernel_times(file, lambda names: dict(zip(names, inputs, strict=True)), arguments.turns,
                             arguments.threads)
    medians = {(node, kind): statistics.median(times[1:]) * 1e9 for (node, kind), times in found.items()}
    computed = {kind: ps for (_, kind), ps in medians.items() if kind not in CONVERSIONS}
    in_integers = any("Integer" in kind or "QLinear" in kind or "Dynamic" in kind or kind == "QGemm"
                      for kind in computed)
    elements = {"QuantizeLinear": inputs[0].numel(), "DequantizeLinear": inputs[0].numel()}
    conversions = {}
    for kind in CONVERSIONS:
        times = [ps for (_, each), ps in medians.items() if each == kind]
        if times:
            conversions[kind] = max(times) / elements[kind]
    if config is not None and not in_integers:
        return None, conversions
    return sum(computed.values()) / units, conversions


def units(op: nn.Module, inputs: tuple[Tensor, ...]) -> float:
    """Multiplications of a product, elements of the result of another op."""
    with torch.no_grad():
        result = op(*inputs)
    match op:
        case nn.Conv2d():
            return result.numel() * math.prod(op.weight.shape[1:])
        case nn.ConvTranspose2d():
            return inputs[0].numel() * math.prod(op.weight.shape[1:])
        case nn.Linear():
            return result.numel() * op.in_features
        case Op(name="matmul"):
            return result.numel() * inputs[0].shape[-1]
    return result.numel()


def row(name: str, models: list[tuple[nn.Module, tuple[Tensor, ...]]], arguments: argparse.Namespace,
        conversions: dict[str, list[float]]) -> tuple[str, ...]:
    cells = []
    for config in (None, "onnxruntime", "dynamic"):
        times = []
        for op, inputs in models:
            ps, seen = picoseconds(op, inputs, config, units(op, inputs), arguments)
            times.append(ps)
            for kind, each in seen.items():
                conversions[kind].append(each)
        known = [each for each in times if each is not None]
        cells.append(f"{statistics.geometric_mean(known):.3g}" if len(known) == len(times) else "–")
    return name, *cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    conversions: dict[str, list[float]] = {kind: [] for kind in CONVERSIONS}
    rows = [row(name, models, arguments, conversions) for name, models in cases().items()]
    rows += [(kind, f"{statistics.median(times):.3g}", "", "") for kind, times in conversions.items() if times]
    columns = (Column("op"), Column("float", number=True), Column("integer", number=True),
               Column("dynamic", number=True))
    print(Table("picoseconds for a multiplication, or an element", columns, tuple(rows)).text())


if __name__ == "__main__":
    main()
