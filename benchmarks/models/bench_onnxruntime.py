"""What ONNX Runtime makes of an exported W8A8 model, and how fast it runs: the operators of its optimized graph.

A convolution that is still ``Conv`` there runs in float; each is named with the operators around it. Times are medians
of interleaved turns in one process, as multiples of the float model's. Weights are random, statistics of batch norms
too. On x86 without VNNI the integer operators are exact only in ONNX Runtime's exact mode, which the table names.

    python benchmarks/models/bench_onnxruntime.py
    python benchmarks/models/bench_onnxruntime.py --models resnet18 --image-size 96 --turns 5
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
import torch
import torchvision
from rich.console import Console
from rich.table import Table
from torch import nn

import qtk
from qtk.export.onnx.session import EXACT_MODE, create_session, integer_sums_saturate

MODELS = ("resnet18", "mobilenet_v2", "mobilenet_v3_small", "efficientnet_b0", "densenet121")


def randomized(name: str) -> nn.Module:
    """A model of torchvision whose batch norms are not the identity."""
    torch.manual_seed(0)
    model = torchvision.models.get_model(name, weights=None)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, 0, 0.1)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.1)
    return model.eval()


def float_convolutions(graph: onnx.GraphProto) -> Iterator[str]:
    """Each convolution that runs in float, with the operators before and behind it."""
    makers = {output: node for node in graph.node for output in node.output}
    for node in graph.node:
        if node.op_type in ("Conv", "FusedConv", "ConvTranspose"):
            before = makers[node.input[0]].op_type if node.input[0] in makers else "the input"
            behind = [reader.op_type for reader in graph.node if node.output[0] in reader.input]
            what = " (a scale and a shift per channel, as ONNX Runtime computes it)" if is_scaling(node) else ""
            yield f"{before} → {node.name} → {', '.join(behind) or 'the output'}{what}"


def is_scaling(node: onnx.NodeProto) -> bool:
    """Whether a convolution multiplies each channel by one number; ONNX Runtime makes them of Mul and Add."""
    attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    return attributes.get("group", 1) > 1 and set(attributes.get("kernel_shape", ())) == {1}


def time_ms(runner: onnxruntime.InferenceSession, x: torch.Tensor) -> float:
    feed = {runner.get_inputs()[0].name: x.numpy()}
    started = time.perf_counter()
    runner.run(None, feed)
    return (time.perf_counter() - started) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--config", default="onnxruntime")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="one small model, to see that the script runs")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.models, arguments.image_size, arguments.turns = ["mobilenet_v3_small"], 64, 3
    mode = f"with {EXACT_MODE}=1" if integer_sums_saturate() else "sums of u8 × s8 are exact on this CPU"
    title = f"ONNX Runtime {onnxruntime.__version__}, {mode}, config {arguments.config}"
    table = Table(title=title, title_justify="left")
    for heading in ("model", "integer Conv", "float Conv", "BatchNorm", "int8 / fp32 time", "fp32, ms"):
        table.add_column(heading)
    named = []
    for name in arguments.models:
        x = torch.randn(4, 3, arguments.image_size, arguments.image_size)
        model = randomized(name)
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
        counts = Counter(node.op_type for node in graph.node)
        convolutions = list(float_convolutions(graph))
        named += [f"{name}: {line}" for line in convolutions]
        int8, fp32 = (statistics.median(times[kind][1:]) for kind in ("int8", "fp32"))
        table.add_row(name, str(counts["QLinearConv"]), str(len(convolutions)), str(counts["BatchNormalization"]),
                      f"{int8 / fp32:.2f}", f"{fp32:.1f}")
    console = Console()
    console.print(table)
    for line in named:
        console.print(f"float: {line}", highlight=False)


if __name__ == "__main__":
    main()
