"""Ten models in every runtime: does it compute what was simulated, in integers, and in how many milliseconds?

Each cell is a model quantized for a runtime's own target, exported, run there and compared with the simulation. A cell
runs in a process of its own with a time limit; what cannot be has a reason. Rows go into the CSV file as they come.

Columns: equal top-1 (argmax of the first output), values of the outputs that are over 0 and over 1 step away, the
largest in steps, SQNR to the simulation; operators in integers and in float (of ExecuTorch and Inductor convolutions
and products alone), the bytes of the file as sim.export writes it (.pt2 of both); milliseconds of the file and of the
float model in the same runtime, one thread, on 1 and 64 rows, and their ratio. Times are medians of interleaved turns
in CPU time of the process. LiteRT's files have one row, and ExecuTorch plans memory for the rows of the example inputs
(8 of the images): their 64 rows are 64 calls.

    python benchmarks/models/bench_runtimes.py --minilm FOLDER
    python benchmarks/models/bench_runtimes.py --only-missing --models digits_cnn crnn --runtimes litert onnxruntime
    python benchmarks/models/bench_runtimes.py --runtimes litert --peer     # beside ai-edge-quantizer's static int8
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from runtime_models import MODELS, Case, build
from torch import Tensor
from tqdm import tqdm

import qtk
from qtk.calls.calls import Call
from qtk.export.file_signature import file_inputs
from qtk.graph.graphs import roots
from qtk.numerics.error import decibels
from qtk.report.verdict import ON, OPENVINO, FileRun
from qtk.runtimes.kinds import RUNTIMES, RuntimeKind
from qtk.runtimes.latency import median_latencies_ms
from qtk.runtimes.loaded_file import rows_like
from qtk.workflow.verify_export import size_bytes

RESULTS = Path(__file__).resolve().parents[1] / "results" / "runtimes.csv"
BATCHES = (1, 64)
FEWEST, MOST = 5, 60
"""Turns of a measurement."""

WAYS = {"onnxruntime": ON, "openvino": OPENVINO}
"""Which way of a file is the runtime as it comes, where it is not the first."""

INT8, FLOAT = "int8", "float"
TIMES = {batch: tuple(f"{what}, {batch} row{'s' if batch > 1 else ''}" for what in ("ms", "float ms", "× float"))
         for batch in BATCHES}
PEER = ("dB to float", "dB to float by ai-edge-quantizer")
NOTHING = "–"
HEADING = ("model", "runtime", "version", "verdict", "top-1 equal", "> 0 steps", "> 1 step", "largest", "dB", "integer",
           "float", "bytes", "float bytes", *TIMES[1], *TIMES[64], *PEER, "s", "reason")
Cells = dict[str, str]


def cell(name: str, kind: RuntimeKind, arguments: argparse.Namespace) -> Cells:
    """Quantizes, exports, compares and times a model for a runtime."""
    cells, reasons = dict.fromkeys(HEADING, NOTHING), []
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        steps: list[Callable[[], Cells]] = []
        try:
            case = build(name, arguments.minilm)
            kind.require()
            sim = qtk.QuantSim(case.model, case.calibration, config=arguments.config or kind.targets[0])
            sim.compute_encodings([case.calibration], progress=False)
            sim.export(Path(folder) / "out", formats=(kind.format,))
            file, in_float = Path(folder) / "out" / kind.file_name(""), Path(folder) / f"float{kind.suffix}"
            graph = roots(qtk.prepare_model(case.model, case.calibration))[""]
            steps = [partial(agreement, sim, case, kind, file),
                     partial(_written, kind, graph, Call(case.calibration, {}, None), in_float)]
            if kind.untimed is None:
                steps.append(partial(times, kind, graph, case, (file, in_float), arguments.seconds))
            if arguments.peer and kind.name == "litert":
                steps.append(partial(beside_peer, case, file, in_float))
        except Exception as error:  # whatever it says
            reasons.append(_first_line(error))
        for step in steps:
            try:
                cells |= step()
            except Exception as error:  # whatever the runtime says
                reasons.append(_first_line(error))
    seconds = time.perf_counter() - started
    return cells | {"s": f"{seconds:.0f}", "reason": "; ".join(dict.fromkeys(reasons)) or NOTHING}


def agreement(sim: qtk.QuantSim, case: Case, kind: RuntimeKind, file: Path) -> Cells:
    """What the runtime computes of the file, against the simulation."""
    verdict = sim.verify_export(file.parent, [case.evaluation], runtime=kind.name, turns=0, threads=1, progress=False)
    way = WAYS.get(kind.name, verdict.runs[0].way)
    run: FileRun = next(each for each in verdict.runs if each.way == way)
    cells = {"version": run.runtime.removesuffix(", optimizations on"), "verdict": verdict.level.value,
             "bytes": f"{verdict.size_bytes:,}"}
    if run.nodes is not None:
        cells |= {"integer": str(sum(run.nodes.integer.values())), "float": str(len(run.nodes.floats))}
    if run.total is None:
        raise ValueError(run.refusal)
    return cells | {
        "top-1 equal": _share(run.top1), "> 0 steps": _share(run.total.other_codes),
        "> 1 step": _share(run.total.beyond_one_step), "dB": f"{run.total.sqnr_db:.1f}",
        "largest": NOTHING if run.total.max_steps is None else f"{run.total.max_steps:.0f}",
    }


def times(kind: RuntimeKind, graph: torch.fx.GraphModule, case: Case, files: tuple[Path, Path],
          seconds: float) -> Cells:
    """Milliseconds of the quantized and of the float file."""
    loaded = {what: kind.load(file, 1) for what, file in zip((INT8, FLOAT), files, strict=True)}
    cells = {}
    for batch in BATCHES:
        rows = tuple(value[torch.arange(batch) % len(value)] for value in case.calibration)
        inputs = file_inputs(graph, Call(rows, {}, None))
        runs = {what: timed(inputs) for what, timed in loaded.items()}
        for run in runs.values():
            run()
        started = time.perf_counter()
        for run in runs.values():
            run()
        turns = max(FEWEST, min(MOST, int(seconds / (time.perf_counter() - started))))
        ms = median_latencies_ms(runs, turns=turns, clock=time.process_time)
        shown = (f"{ms[INT8]:.3g}", f"{ms[FLOAT]:.3g}", f"{ms[INT8] / ms[FLOAT]:.2f}")
        cells |= dict(zip(TIMES[batch], shown, strict=True))
    return cells


def beside_peer(case: Case, file: Path, in_float: Path) -> Cells:
    """SQNR to the float model of the file, and of the float file in ai-edge-quantizer's static int8."""
    with torch.no_grad():
        returned = case.model(*case.evaluation)
    expected = returned[0] if isinstance(returned, tuple) else returned
    cells = {PEER[0]: _to_float_db(file, case.evaluation, expected)}
    try:
        other = by_ai_edge_quantizer(in_float, case)
        return cells | {PEER[1]: _to_float_db(other, case.evaluation, expected)}
    except Exception as error:  # whatever it says
        return cells | {PEER[1]: f"{type(error).__name__}: {_first_line(error)}"[:60]}


def by_ai_edge_quantizer(in_float: Path, case: Case) -> Path:
    """The float file in static int8, beside it; calibrated on the same inputs, row by row."""
    from ai_edge_quantizer import quantizer, recipe  # an extra of the benchmark

    from qtk.runtimes.litert_file import LiteRtFile

    names = LiteRtFile(in_float, {}, threads=1).inputs
    dtypes = [torch.int32 if each.dtype is torch.int64 else each.dtype for each in case.calibration]
    data = [{name: value[row:row + 1].to(dtype).numpy() for name, value, dtype in zip(
        names, case.calibration, dtypes, strict=True)} for row in range(len(case.calibration[0]))]
    made = quantizer.Quantizer(str(in_float))
    made.load_quantization_recipe(recipe.static_wi8_ai8())
    result = made.quantize(made.calibrate({"serving_default": data}, num_threads=1), enable_progress_report=False)
    path = in_float.with_name("other.tflite")
    path.write_bytes(bytes(result.quantized_model))
    return path


def _to_float_db(file: Path, inputs: Sequence[Tensor], expected: Tensor) -> str:
    from qtk.runtimes.litert_file import LiteRtFile

    loaded = LiteRtFile(file, {}, threads=1)
    found = rows_like(loaded.run(dict(zip(loaded.inputs, inputs, strict=True)))[loaded.outputs[0]], expected)
    assert found is not None
    return f"{decibels(float(expected.double().square().sum()), float((expected - found).double().square().sum())):.1f}"


def _written(kind: RuntimeKind, graph: torch.fx.GraphModule, call: Call, path: Path) -> Cells:
    kind.write_float(graph, call, path)
    return {"float bytes": f"{size_bytes(path):,}"}


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2%}"


def _first_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return (text[:200] + "…" if len(text) > 200 else text) or type(error).__name__


def in_own_process(name: str, runtime: str, arguments: argparse.Namespace) -> Cells:
    """The cell, or why there is none: it failed as a whole, or took too long."""
    empty = dict.fromkeys(HEADING, NOTHING) | {"model": name, "runtime": runtime}
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "cell.json"
        command = [sys.executable, __file__, "--cell", name, runtime, "--into", str(into),
                   "--seconds", str(arguments.seconds), *(["--peer"] if arguments.peer else []),
                   *(["--minilm", str(arguments.minilm)] if arguments.minilm else []),
                   *(["--config", arguments.config] if arguments.config else [])]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        with (Path(folder) / "stderr").open("w+", encoding="utf-8") as said:
            child = subprocess.Popen(command, stdout=said, stderr=said, env=environment, start_new_session=True)
            try:
                child.wait(arguments.limit)
            except subprocess.TimeoutExpired:
                return empty | {"s": f"{arguments.limit}", "reason": f"takes over {arguments.limit} s"}
            finally:
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)
                    child.wait()
            if not into.exists():
                said.seek(0)
                last = next(iter(reversed([line for line in said.read().splitlines() if line.strip()])), "")
                return empty | {"reason": f"ended with {child.returncode}: {last.strip()[:200]}"}
        return empty | json.loads(into.read_text(encoding="utf-8")) | {"model": name, "runtime": runtime}


def read(path: Path) -> dict[tuple[str, str], Cells]:
    """The cells of a CSV file, by model and runtime."""
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        return {(row["model"], row["runtime"]): dict.fromkeys(HEADING, NOTHING) | row for row in csv.DictReader(file)}


def write(path: Path, cells: dict[tuple[str, str], Cells]) -> None:
    """In the order of the models, then of the runtimes."""
    models, runtimes = list(MODELS), list(RUNTIMES)
    order = sorted(cells, key=lambda key: (models.index(key[0]), runtimes.index(key[1])))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, HEADING, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(cells[key] for key in order)


def table(cells: dict[tuple[str, str], Cells], peer: bool) -> Table:
    shown = [each for each in HEADING if each not in ("version", "float bytes") and (peer or each not in PEER)]
    printed = Table(title="Each runtime by its own target, one thread", title_justify="left")
    for heading in shown:
        printed.add_column(heading, justify="left" if heading in ("model", "runtime", "reason") else "right")
    for row in cells.values():
        printed.add_row(*(row[each] for each in shown))
    return printed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--runtimes", nargs="+", default=list(RUNTIMES), choices=list(RUNTIMES))
    parser.add_argument("--minilm", type=Path, help="a folder with the files of all-MiniLM-L6-v2")
    parser.add_argument("--config", help="a target, or a file that extends it, in place of each runtime's own")
    parser.add_argument("--csv", type=Path, default=RESULTS, help="where rows are written, and read by --only-missing")
    parser.add_argument("--only-missing", action="store_true", help="cells that the CSV file has not, or with a reason")
    parser.add_argument("--peer", action="store_true", help="of LiteRT: beside ai-edge-quantizer's static int8")
    parser.add_argument("--limit", type=int, default=1800, help="seconds of a cell")
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds of a measurement, about")
    parser.add_argument("--quick", action="store_true", help="one model where its runtime is installed")
    parser.add_argument("--cell", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if arguments.cell:
        made = cell(arguments.cell[0], RUNTIMES[arguments.cell[1]], arguments)
        arguments.into.write_text(json.dumps(made), encoding="utf-8")
        return
    if arguments.quick:
        arguments.models, arguments.seconds = ["gru_stream"], 0.1
        arguments.runtimes = [name for name in RUNTIMES if RUNTIMES[name].missing is None]
        arguments.csv = Path(tempfile.mkdtemp()) / "runtimes.csv"
    known = read(arguments.csv)
    wanted = [(model, runtime) for model in arguments.models for runtime in arguments.runtimes]
    if arguments.only_missing:
        wanted = [key for key in wanted if key not in known or known[key]["reason"] != NOTHING]
    console = Console(width=220)
    for model, runtime in tqdm(wanted, desc="cells", unit="cell"):
        known[model, runtime] = made = in_own_process(model, runtime, arguments)
        write(arguments.csv, known)
        tqdm.write(" | ".join(value for value in made.values() if value != NOTHING))
    console.print(table({key: row for key, row in known.items() if key[0] in arguments.models
                         and key[1] in arguments.runtimes}, arguments.peer))


if __name__ == "__main__":
    main()
