"""Which products of exported W8A8 models ONNX Runtime computes in integers, and how fast the models run.

A Conv, Gemm or MatMul that is left in the optimized graph runs in float; each is named with the operators around it,
which give the reason: an operand without DequantizeLinear in front of it, or no QuantizeLinear behind a convolution.
Times are medians of interleaved turns in one process. Weights are random, statistics of batch norms too.

    python benchmarks/models/bench_integer_nodes.py
    python benchmarks/models/bench_integer_nodes.py --models resnet50 bert --turns 10 --config onnxruntime_vnni
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import onnx
import onnxruntime
import timm
import torch
import torchvision
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import qtk
from qtk.export.onnx.session import EXACT_MODE, create_session, integer_sums_saturate

MODELS = ("resnet50", "mobilenetv2_100", "mobilenetv3_small_100", "efficientnet_b0", "convnext_atto",
          "vit_small_patch16_224", "vit_b_16", "swin_tiny_patch4_window7_224", "mobilevitv2_100", "bert")
FLOAT_PRODUCTS = ("Conv", "FusedConv", "NhwcFusedConv", "ConvTranspose", "Gemm", "FusedGemm", "MatMul", "FusedMatMul",
                  "MatMulNBits")
INTEGER_PRODUCTS = ("QLinearConv", "QGemm", "QLinearMatMul", "MatMulIntegerToFloat", "MatMulInteger")


class Bert(nn.Module):
    """Embeddings, post-norm layers, and a head on the first token."""

    def __init__(self, layers: int = 4, width: int = 384, words: int = 1000, length: int = 128) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(length, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, width // 64, 4 * width, activation="gelu", batch_first=True)
            for _ in range(layers)
        )
        self.pooler, self.head = nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.words(tokens) + self.positions.weight)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.pooler(x[:, 0]).tanh())


def build(name: str) -> tuple[nn.Module, Tensor]:
    """The model, and inputs for it."""
    torch.manual_seed(0)
    if name == "bert":
        return Bert().eval(), torch.randint(1000, (4, 128))
    is_vision = name in torchvision.models.list_models() and name not in timm.list_models()
    model = torchvision.models.get_model(name, weights=None) if is_vision else timm.create_model(name)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, 0, 0.1)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    return model.eval(), torch.randn(4, 3, 224, 224)


def float_products(graph: onnx.GraphProto) -> Iterator[str]:
    """Each product that runs in float, with the operators before and behind it."""
    makers = {output: node.op_type for node in graph.node for output in node.output}
    for node in graph.node:
        if node.op_type in FLOAT_PRODUCTS:
            before = ", ".join(makers.get(value, "a constant or input") for value in node.input if value)
            behind = ", ".join(reader.op_type for reader in graph.node if node.output[0] in reader.input)
            yield f"{node.op_type} {node.name}: of {before}; read by {behind or 'nothing: an output'}"


def time_ms(runner: onnxruntime.InferenceSession, x: Tensor) -> float:
    feed = {runner.get_inputs()[0].name: x.numpy()}
    started = time.perf_counter()
    runner.run(None, feed)
    return (time.perf_counter() - started) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--config", default="onnxruntime")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one small model, to see that the script runs")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.models, arguments.turns = ["mobilenetv3_small_100"], 3
    mode = f"with {EXACT_MODE}=1" if integer_sums_saturate() else "sums of u8 × s8 are exact on this CPU"
    table = Table(title=f"ONNX Runtime {onnxruntime.__version__}, {mode}, config {arguments.config}, "
                        f"{arguments.threads} threads, batch 1", title_justify="left")
    for heading in ("model", "integer products", "float products", "int8, ms", "fp32, ms", "int8 / fp32"):
        table.add_column(heading)
    named = []
    for name in arguments.models:
        model, x = build(name)
        sim = qtk.QuantSim(model, x[:1], config=arguments.config)
        sim.compute_encodings(x.split(2), progress=False)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            sim.export(path / "int8", formats=["onnx"])
            torch.onnx.export(model, (x[:1],), path / "fp32.onnx", dynamo=True, verbose=False)
            runners = {
                "int8": create_session(
                    path / "int8" / "model.onnx", threads=arguments.threads, optimized_file=path / "optimized.onnx")[0],
                "fp32": create_session(path / "fp32.onnx", threads=arguments.threads)[0],
            }
            graph = onnx.load(path / "optimized.onnx", load_external_data=False).graph
            times: dict[str, list[float]] = {kind: [] for kind in runners}
            for _ in range(arguments.turns + 1):
                for kind, runner in runners.items():
                    times[kind].append(time_ms(runner, x[:1]))
        kinds = Counter(node.op_type for node in graph.node)
        left = list(float_products(graph))
        named += [f"{name}: {line}" for line in left]
        int8, fp32 = (statistics.median(times[kind][1:]) for kind in ("int8", "fp32"))
        counts = ", ".join(f"{kinds[kind]} {kind}" for kind in INTEGER_PRODUCTS if kinds[kind])
        table.add_row(name, counts, str(len(left)), f"{int8:.1f}", f"{fp32:.1f}", f"{int8 / fp32:.2f}")
        Console().print(f"{name}: {counts}; float {len(left)}; int8 {int8:.1f} ms, fp32 {fp32:.1f} ms", highlight=False)
    console = Console(width=140)
    console.print(table)
    for line in named:
        console.print(f"float: {line}", highlight=False)


if __name__ == "__main__":
    main()
