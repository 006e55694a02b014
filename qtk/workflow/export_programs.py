"""Writes simulations as programs of torch, and as files that a converter makes of these: PT2E, LiteRT, Core AI."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import fx

from qtk.analysis.simulated_values import SimulatedValue
from qtk.calls.calls import Call
from qtk.calls.inputs import ExampleInputs
from qtk.export import pt2e as program
from qtk.export.file_signature import file_inputs, file_signature, file_stem, tensor_outputs
from qtk.export.simulated_sites import step_of
from qtk.graph.insert import quantizer_called
from qtk.graph.simulation import Simulation
from qtk.report.findings import agrees
from qtk.report.stages import Stages
from qtk.runtimes.kinds import RUNTIMES, RuntimeKind
from qtk.runtimes.loaded_file import LoadedFile
from qtk.runtimes.runtime_runs import Opener, RuntimeRuns
from qtk.runtimes.tolerance import tolerances_db
from qtk.workflow.exported_graphs import graph_calls, read_back

LITERT, COREAI = "litert", "coreai"


def pt2e_name(path: str) -> str:
    """File name of a captured graph as an exported program: ``model.pt2``, else as ``onnx_name``."""
    return f"{file_stem(path or 'model')}.pt2"


def pt2e(simulation: Simulation, example_inputs: ExampleInputs, folder: Path, stages: Stages) -> None:
    """Writes a program for each graph. Raises: ExportError as ``qtk.export.pt2e``."""
    for path, (graph, call) in graph_calls(simulation.model, example_inputs).items():
        file = folder / pt2e_name(path)
        begin = stages.of(file.name)
        begin("writing")
        program.export(graph, call, file, target=simulation.target)
        begin("reading back")
        with read_back(file):
            program.compare_with_simulation(file, graph)


def litert(
    simulation: Simulation, example_inputs: ExampleInputs, folder: Path, stages: Stages, *, io_codes: bool = False,
    run: bool = True,
) -> None:
    """Writes a ``.tflite`` file for each graph, and warns of what it computes otherwise than the simulation.

    Args:
        simulation: the simulation.
        example_inputs: what the model runs on; a file has its lengths, and one row.
        folder: where the files are written.
        stages: is told each stage when it begins.
        io_codes: take and return quantized inputs and outputs as codes.
        run: run each file on the example inputs, where ai-edge-litert is installed.

    Raises: ExportError as ``qtk.export.litert.file``.
    """
    from qtk.export.litert import file as litert_file  # loaded here: few exports need it
    from qtk.runtimes.litert_file import LiteRtFile

    def export(graph: fx.GraphModule, call: Call, file: Path) -> None:
        litert_file.export(graph, call, file, target=simulation.target, codes=io_codes)

    def opener(path: Path, reasons: Mapping[str, str], threads: int) -> LoadedFile:
        return LiteRtFile(path, reasons, threads=threads)

    graphs = graph_calls(simulation.model, example_inputs)
    _written(RUNTIMES[LITERT], graphs, folder, stages, export, litert_file.compare_with_simulation, opener, run=run)


def coreai(
    simulation: Simulation, example_inputs: ExampleInputs, folder: Path, stages: Stages, *, run: bool = True
) -> None:
    """Writes an ``.aimodel`` directory for each graph, and warns of what it computes otherwise than the simulation.

    Raises: ExportError as ``qtk.export.coreai.file``.
    """
    from qtk.export.coreai import file as coreai_file  # loaded here: few exports need it
    from qtk.runtimes.coreai_file import CoreAiFile

    def export(graph: fx.GraphModule, call: Call, file: Path) -> None:
        coreai_file.export(graph, call, file, target=simulation.target)

    def opener(path: Path, reasons: Mapping[str, str], threads: int) -> LoadedFile:
        return CoreAiFile(path, reasons, threads=threads)

    graphs = graph_calls(simulation.model, example_inputs)
    _written(RUNTIMES[COREAI], graphs, folder, stages, export, coreai_file.compare_with_simulation, opener, run=run)


def _written(
    kind: RuntimeKind, graphs: Mapping[str, tuple[fx.GraphModule, Call]], folder: Path, stages: Stages,
    export: Callable[[fx.GraphModule, Call, Path], object], compare: Callable[[Path, fx.GraphModule], None],
    opener: Opener, *, run: bool,
) -> None:
    """Writes a file of a runtime for each graph, reads it back, and runs it where the runtime is installed."""
    for path, (graph, call) in graphs.items():
        file = folder / kind.file_name(path)
        begin = stages.of(file.name)
        begin("writing")
        export(graph, call, file)
        begin("reading back")
        with read_back(file):
            compare(file, graph)
        if run and kind.missing is None:
            begin("running")
            _warn_of_departures(kind, opener, file, graph, call)


def _warn_of_departures(kind: RuntimeKind, opener: Opener, file: Path, graph: fx.GraphModule, call: Call) -> None:
    """Warns where the runtime, as it comes, is farther from the simulation than float rounding explains."""
    expected = tensor_outputs(graph, call)
    quantizers = [quantizer_called(node) for node in file_signature(graph).outputs.values()]
    runs = RuntimeRuns(file, {}, {kind.title: opener})
    try:
        runs.compare(file_inputs(graph, call), [
            SimulatedValue(value, step_of(each, value)) for value, each in zip(expected, quantizers, strict=True)], {})
        first = runs.runs()[0]
    finally:
        runs.close()
    if not (agrees(first) or agrees(first, () if first.total is None else tolerances_db(graph, call, expected))):
        how = f"is {first.least.sqnr_db:.1f} dB from the simulation" if first.refusal is None else (
            f"says {first.refusal}")
        warnings.warn(f"{file.name} was written, but {first.runtime} {how}; sim.verify_export(directory, data, "
                      f"runtime={kind.name!r}) finds the first tensor that differs", stacklevel=2)
