"""What a quantized model is worth in ONNX Runtime on the CPU: qtk's file beside ONNX Runtime's own quantizer.

Per model: the float export, qtk's target, ``quantize_static`` (QDQ, per channel) and ``quantize_dynamic`` of ONNX
Runtime. Latencies are medians of interleaved turns in one process. "float nodes" counts the convolutions and matrix
products that run in float in ONNX Runtime's optimized graph; qtk's are named below the table with the reason. SQNR is
that of the outputs against the float model; of qtk's file also against its simulation. Weights are random. On x86
without VNNI the files of ONNX Runtime's quantizer are made with ``reduce_range``, as its documentation says.

    python benchmarks/models/bench_deploy.py
    python benchmarks/models/bench_deploy.py --models resnet50 bert_4x384 --turns 10 --csv figures.csv
    python benchmarks/models/bench_deploy.py --models resnet18 densenet121 --config onnxruntime_vnni
    python benchmarks/models/bench_deploy.py --models mobilenetv3_small_050 --threads 1 --batch 64
    python benchmarks/models/bench_deploy.py --models resnet18 --threads 1 --weight-bits 4
"""

from __future__ import annotations

import argparse
import csv
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import onnx
import onnxruntime
import torch
from deployed_models import MODELS, build, inputs
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quant_pre_process,
    quantize_dynamic,
    quantize_static,
)
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import qtk
from qtk.report.runtime_nodes import RuntimeNodes
from qtk.runtimes.executed_nodes import INTEGER, WEIGHTED, computing_kinds, executed_nodes
from qtk.runtimes.latency import median_latencies_ms
from qtk.runtimes.session import create_session, integer_sums_saturate

FLOAT, QTK, STATIC, DYNAMIC = "float", "qtk", "ORT static", "ORT dynamic"
CALIBRATION_BATCHES = 4
LARGEST_FILE, LARGEST_LATENCY = 0.27, 1.0
"""Targets for qtk's file, as parts of the float file and of its latency."""


@dataclass(frozen=True)
class Figures:
    """One file of one model; ratios are to the float file."""

    model: str
    file: str
    size_bytes: int
    size_ratio: float
    latency_ms: float
    latency_ratio: float
    integer_nodes: int
    float_nodes: int
    sqnr_db: float | None
    sqnr_to_simulation_db: float | None


class Batches(CalibrationDataReader):
    """Calibration data for ONNX Runtime's quantizer."""

    def __init__(self, name: str, batches: list[Tensor]) -> None:
        self._feeds: Iterator[dict[str, object]] = iter([{name: batch.numpy()} for batch in batches])

    def get_next(self) -> dict[str, object] | None:
        return next(self._feeds, None)


def sqnr_db(expected: Tensor, found: Tensor) -> float:
    error = (expected.double() - found.double()).square().sum()
    return float(10 * torch.log10(expected.double().square().sum() / error))


def write_files(
    name: str, model: nn.Module, folder: Path, *, config: str, batch: int, weight_bits: int
) -> tuple[dict[str, Path], qtk.QuantSim]:
    """Writes all files of a model. Returns: those that could be made, by name, and qtk's simulation."""
    x = inputs(name, model, batch, seed=0)
    batches = [inputs(name, model, batch, seed=seed) for seed in range(1, 1 + CALIBRATION_BATCHES)]
    files = {kind: folder / f"{kind.replace(' ', '_')}.onnx" for kind in (FLOAT, STATIC, DYNAMIC)}
    torch.onnx.export(model, (x,), files[FLOAT], dynamo=True, verbose=False, external_data=False)
    captured = qtk.prepare_model(model, x, dynamic_shapes=None)  # fixed shapes, as in the float file
    sim = qtk.QuantSim(captured, x, config=config, weight_bits=weight_bits)
    sim.compute_encodings(batches, progress=False)
    sim.export(folder / "qtk", formats=["onnx"])
    files[QTK] = folder / "qtk" / "model.onnx"
    prepared = folder / "prepared.onnx"
    reader = Batches(create_session(files[FLOAT])[0].get_inputs()[0].name, batches)
    reduced = integer_sums_saturate()
    peers: dict[str, Callable[[], None]] = {
        STATIC: lambda: quantize_static(
            prepared, files[STATIC], reader, quant_format=QuantFormat.QDQ, per_channel=True, reduce_range=reduced,
            activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
        ),
        DYNAMIC: lambda: quantize_dynamic(prepared, files[DYNAMIC], per_channel=True, reduce_range=reduced),
    }
    quant_pre_process(files[FLOAT], prepared, skip_symbolic_shape=True)
    without_shapes = onnx.load(prepared)
    del without_shapes.graph.value_info[:]  # those of torch's exporter stop quantize_dynamic
    onnx.save(without_shapes, prepared)
    for kind, make in peers.items():
        try:
            make()
            create_session(files[kind])
        except Exception as error:
            print(f"{name}: {kind} fails: {str(error).splitlines()[0][:160]}")
            del files[kind]
    return files, sim


def measure(name: str, arguments: argparse.Namespace) -> tuple[list[Figures], RuntimeNodes]:
    """The figures of all files of a model, and the nodes that qtk's file is run with."""
    model = build(name)
    x = inputs(name, model, arguments.batch, seed=99)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        files, sim = write_files(name, model, folder, config=arguments.config, batch=arguments.batch,
                                 weight_bits=arguments.weight_bits)
        with torch.no_grad():
            expected, simulated = model(x), sim.model(x)
        kinds, outputs, runners = {}, {}, {}
        for kind, file in files.items():
            optimized = folder / "optimized.onnx"
            session, _ = create_session(file, threads=arguments.threads, optimized_file=optimized)
            kinds[kind] = computing_kinds(optimized)
            if kind == QTK:
                reasons = {site.name: why for site, why in sim.plan.unquantized.items()}
                nodes = executed_nodes(optimized, file, reasons)
            feed = {session.get_inputs()[0].name: x.numpy()}
            runners[kind] = partial(session.run, None, feed)
            outputs[kind] = torch.from_numpy(runners[kind]()[0])
        latencies_ms = median_latencies_ms(runners, turns=arguments.turns, progress=True)
        figures = [
            Figures(
                name, kind, size := file.stat().st_size, size / files[FLOAT].stat().st_size,
                latencies_ms[kind], latencies_ms[kind] / latencies_ms[FLOAT],
                sum(count for each, count in kinds[kind].items() if INTEGER.search(each)),
                sum(kinds[kind][each] for each in WEIGHTED),
                None if kind == FLOAT else sqnr_db(expected, outputs[kind]),
                sqnr_db(simulated, outputs[kind]) if kind == QTK else None,
            )
            for kind, file in files.items()
        ]
    return figures, nodes


def missed(figures: list[Figures]) -> Iterator[str]:
    """The targets that qtk's file of a model does not reach."""
    by_file = {each.file: each for each in figures}
    ours = by_file[QTK]
    if ours.size_ratio > LARGEST_FILE:
        yield f"{ours.size_ratio:.3f} of the float file's bytes"
    if ours.latency_ratio > LARGEST_LATENCY:
        yield f"{ours.latency_ratio:.2f} of float's latency"
    if STATIC in by_file and ours.latency_ms > by_file[STATIC].latency_ms:
        yield f"{ours.latency_ms / by_file[STATIC].latency_ms:.2f} of the latency of ONNX Runtime's own quantizer"


def text(number: float | None, digits: int = 1) -> str:
    return "" if number is None else f"{number:.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, help="these, or any of timm")
    parser.add_argument("--config", default="onnxruntime")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1, help="rows of an input")
    parser.add_argument("--weight-bits", type=int, default=8, help="of qtk's file")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--quick", action="store_true", help="one small model, to see that the script runs")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.models, arguments.turns = ["lstm_classifier"], 3
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    saturates = "saturates u8 × s8" if integer_sums_saturate() else "has exact sums of u8 × s8"
    table = Table(
        title=f"ONNX Runtime {onnxruntime.__version__}, {arguments.threads} threads, batch {arguments.batch}; this CPU "
        f"{saturates}; qtk's target {arguments.config}", title_justify="left",
    )
    for heading in ("model", "file", "bytes", "× float", "ms", "× float", "integer nodes", "float nodes", "SQNR, dB",
                    "to simulation, dB"):
        table.add_column(heading, justify="left" if heading in ("model", "file") else "right")
    everything, notes = [], []
    console = Console(width=150)
    for name in arguments.models:
        figures, nodes = measure(name, arguments)
        everything += figures
        for each in figures:
            table.add_row(
                name if each.file == FLOAT else "", each.file, f"{each.size_bytes:,}", text(each.size_ratio, 3),
                text(each.latency_ms, 2), text(each.latency_ratio, 2), str(each.integer_nodes), str(each.float_nodes),
                text(each.sqnr_db), text(each.sqnr_to_simulation_db), end_section=each is figures[-1],
            )
        notes += [f"{name}: float {node.kind} {node.op}: {node.reason}" for node in nodes.weighted_floats]
        notes += [f"{name}: missed: {target}" for target in missed(figures)]
        console.print(table)
    for note in notes:
        console.print(note, highlight=False)
    if arguments.csv is not None:
        with arguments.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(asdict(everything[0])))
            writer.writeheader()
            writer.writerows(asdict(each) for each in everything)


if __name__ == "__main__":
    main()
