"""What exported programs are worth in the compilers they are for, batch 1: Inductor on x86, and ExecuTorch's XNNPACK.

Per model: the float model compiled by Inductor, the program of ``onnxruntime_vnni`` compiled by Inductor with torchao's
patterns, the program of ``xnnpack`` lowered by ExecuTorch and run by its Python runtime. Latencies are medians of
interleaved turns in one process. "float layers" counts convolutions and linear layers that do not run in integers; they
are named below the table. SQNR and top-1 are those of the outputs against the simulation, over made inputs. Weights are
random. Needs torchao and executorch.

    python benchmarks/models/bench_lowering.py
    python benchmarks/models/bench_lowering.py --models resnet18 --ways float xnnpack --turns 10
"""

from __future__ import annotations

import argparse
import importlib
import logging
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deployed_models import build, inputs
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx, nn
from torch._inductor import config as inductor
from torch._inductor.utils import run_and_get_code
from torch.export import ExportedProgram

import qtk
from qtk.runtimes.executorch_program import is_integer
from qtk.runtimes.inductor_program import INTEGER
from qtk.runtimes.latency import median_latencies_ms

FLOAT, X86, XNNPACK = "float, compiled", "x86, compiled", "XNNPACK"
WAYS = {"float": FLOAT, "x86": X86, "xnnpack": XNNPACK}
TARGETS = {X86: "onnxruntime_vnni", XNNPACK: "xnnpack"}
MODELS = ("resnet18", "mobilenetv2_100", "vit_tiny_patch16_224")
FLOAT_CALL = re.compile(
    r"(?:extern_kernels|torch\.ops\.mkldnn|torch\.ops\.mkl)\.(addmm|mm|convolution|_convolution\w*|_linear\w*|_mkl_linear)")


@dataclass(frozen=True)
class Lowered:
    """A model that a compiler made: what runs, and how many of its layers run in integers."""

    run: Callable[..., Any]
    integer_layers: int
    float_layers: tuple[str, ...]


def register(way: str) -> None:
    """Imports what a way needs besides its compiler. Raises: ModuleNotFoundError without its package."""
    if way == XNNPACK:
        importlib.import_module("executorch.kernels.quantized")  # quantize and dequantize outside of the delegate
    if way == X86:
        importlib.import_module("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")  # registers the patterns


def compiled(model: nn.Module, *args: Any, **kwargs: Any) -> Lowered:
    """A float model or a program, compiled by Inductor for example arguments."""
    with torch.no_grad(), inductor.patch(freezing=True):
        function = torch.compile(model)
        _, code = run_and_get_code(function, *args, **kwargs)

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return function(*args, **kwargs)

    source = "\n".join(code)
    floats = Counter(FLOAT_CALL.findall(source))
    return Lowered(run, len(INTEGER.findall(source)), tuple(kind for kind in floats for _ in range(floats[kind])))


def delegated(program: ExportedProgram) -> Lowered:
    """A program lowered for XNNPACK, in ExecuTorch's runtime."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from executorch.exir.lowered_backend_module import get_lowered_submodules
    from executorch.extension.pybindings.portable_lib import _unsafe_reset_threadpool
    from executorch.runtime import Runtime

    _unsafe_reset_threadpool(torch.get_num_threads())
    edge = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
    graph = edge.exported_program().graph_module
    integer, floats = 0, [node.format_node() or "" for node in graph.graph.nodes if is_layer(node)]
    for _, lowered, _ in get_lowered_submodules(graph):
        for node in filter(is_layer, lowered.original_module.graph.nodes):
            if is_integer(node):
                integer += 1
            else:
                floats.append(node.name)
    buffer = edge.to_executorch().buffer
    method = Runtime.get().load_program(buffer).load_method("forward")
    assert method is not None

    def run(*values: Any, buffer: bytes = buffer) -> Any:  # the method reads the buffer as long as it runs
        results = method.execute(list(values))
        return results[0] if len(results) == 1 else results

    return Lowered(run, integer, tuple(floats))


def is_layer(node: fx.Node) -> bool:
    """Whether a node of ExecuTorch's edge dialect is a convolution or a linear layer."""
    return any(f"aten.{kind}.default" in str(node.target) for kind in ("convolution", "linear", "addmm", "mm"))


def lower(
    name: str, model: nn.Module, way: str, folder: Path
) -> tuple[Lowered, nn.Module | None]:
    """Returns: what runs, and the simulation."""
    x = inputs(name, model, 1, seed=0)
    if way == FLOAT:
        return compiled(model, x), None
    prepared = qtk.prepare_model(model, x, dynamic_shapes=None)
    sim = qtk.QuantSim(prepared, x, config=TARGETS[way])
    sim.compute_encodings([inputs(name, model, 1, seed=seed) for seed in range(1, 5)], progress=False)
    sim.export(folder / way, formats=("pt2e",))
    program = torch.export.load(folder / way / "model.pt2")
    return (compiled(program.module(), x) if way == X86 else delegated(program)), sim.model


def sqnr_db(expected: Tensor, found: Tensor) -> float:
    error = (expected.double() - found.double()).square().sum()
    return float(10 * torch.log10(expected.double().square().sum() / error))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, help="these, or any of timm")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--inputs", type=int, default=20, help="made inputs that SQNR and top-1 are taken over")
    parser.add_argument("--quick", action="store_true", help="one model in float, to see that the script runs")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.models, arguments.ways, arguments.turns, arguments.inputs = ["test_resnet"], ["float"], 3, 2
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    ways = [WAYS[way] for way in arguments.ways]
    for way in ways:
        register(way)
    report(arguments.models, ways, arguments.turns, arguments.inputs)


def report(models: Sequence[str], ways: Sequence[str], turns: int, num_inputs: int) -> None:
    """Measures the models and prints the table."""
    table = Table(title=f"torch {torch.__version__}, {torch.get_num_threads()} threads, batch 1", title_justify="left")
    for heading in ("model", "way", "ms", "× float", "integer layers", "float layers", "SQNR, dB", "top-1"):
        table.add_column(heading, justify="left" if heading in ("model", "way") else "right")
    notes: list[str] = []
    for name in models:
        model = build(name)
        values = [inputs(name, model, 1, seed=100 + seed) for seed in range(num_inputs)]
        with tempfile.TemporaryDirectory() as folder:
            lowered = {way: lower(name, model, way, Path(folder)) for way in ways}
        latencies_ms = median_latencies_ms(
            {way: partial(each.run, values[0]) for way, (each, _) in lowered.items()}, turns=turns, progress=True)
        for way, (each, simulation) in lowered.items():
            with torch.no_grad():
                found = torch.cat([each.run(value).clone() for value in values])
                expected = torch.cat([(simulation or model)(value) for value in values])
            agreement = (found.argmax(1) == expected.argmax(1)).double().mean()
            ratio = latencies_ms[way] / latencies_ms[FLOAT] if FLOAT in latencies_ms else float("nan")
            table.add_row(name, way, f"{latencies_ms[way]:.2f}", f"{ratio:.2f}", str(each.integer_layers),
                          str(len(each.float_layers)), f"{sqnr_db(expected, found):.1f}", f"{agreement:.0%}")
            if way != FLOAT:
                notes += [f"{name}, {way}: float {layer}" for layer in each.float_layers]
        table.add_section()
    console = Console(width=150)
    console.print(table)
    for note in notes:
        console.print(note, highlight=False)


if __name__ == "__main__":
    main()
