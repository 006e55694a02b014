"""Runs exported files in their runtimes and compares what they compute with the simulation."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from qtk.analysis.simulated_values import SimulatedValue, SimulatedValues
from qtk.calls.calls import Call
from qtk.calls.signature import input_names, values_of
from qtk.core.dtypes import FloatDtype
from qtk.data.forward_pass import Data, Forward, run_all
from qtk.data.valid_tokens import Valid, ValidTokens
from qtk.errors import CalibrationError, ExportError
from qtk.export.file_signature import file_inputs, file_outputs, file_signature, tensor_outputs
from qtk.export.simulated_sites import step_of
from qtk.graph.captured_graph import CapturedGraph
from qtk.graph.graphs import roots
from qtk.graph.insert import quantizer_called
from qtk.graph.simulation import Simulation
from qtk.graph.written_buffers import buffer_values
from qtk.quantizers.modes import in_mode
from qtk.quantizers.quantizer import Mode, Quantizer
from qtk.report.findings import Circumstances, agrees
from qtk.report.verdict import Finding, Level, Verdict
from qtk.runtimes.kinds import RUNTIMES, RuntimeKind
from qtk.runtimes.session import NO_BFLOAT16, bfloat16_remedy, integer_sums_saturate
from qtk.runtimes.tied_picks import lowest_index_first
from qtk.runtimes.tolerance import tolerances_db
from qtk.transforms.keep_batch_norms import folded
from qtk.workflow.far_from_float import far_from_float

SIMULATION = "the simulation"
TURNS = 30


def verify_export(
    simulation: Simulation,
    directory: str | os.PathLike[str],
    data: Data,
    *,
    forward: Forward | None = None,
    runtime: str = "onnxruntime",
    float_export: str | os.PathLike[str] | None = None,
    turns: int = TURNS,
    progress: bool = True,
    valid: Valid | None = None,
    batch_size: int = 1,
    threads: int | None = None,
) -> Verdict:
    """Runs the files of an export directory in a runtime and judges them; of a model with islands, file by file.

    >>> import qtk
    >>> sim, batches = qtk.QuantSim(nn.Linear(4, 2).eval(), torch.randn(8, 4)), [torch.randn(8, 4)]
    >>> sim.compute_encodings(batches, progress=False)
    >>> folder = Path(tempfile.mkdtemp()) / "exported"
    >>> sim.export(folder)
    >>> sim.verify_export(folder, batches, turns=0).exact.top1
    1.0

    Args:
        simulation: the simulation they were exported from.
        directory: the directory.
        data: batches, or a function that runs the model over its own.
        forward: how to run the model on a batch, where the default does not fit.
        runtime: the runtime they are for, a name in ``qtk.runtimes.kinds.RUNTIMES``: it decides which files are run,
            and what is red.
        float_export: a directory with float exports of the same files, or the file; ``None``: they are made.
        turns: how often each runtime runs for the median of its latency; 0: latency is not measured.
        progress: show bars where it takes longer than seconds.
        valid: which tokens count in the comparison, as in ``compute_encodings``; ``None``: all.
        batch_size: the rows that the latency is of; all of the first batch, as the verdict says, where the file does
            not run on so many.
        threads: threads within an op while the file runs; ``None`` leaves the number to the runtime.

    Raises: ExportError if ``batch_size`` or ``threads`` is below 1, a file is missing or belongs to another simulation,
        the runtime is not installed or does not run the file, ONNX Runtime not even with the optimizations off;
        CalibrationError without any batch, or any of the exported kind, or as ``compute_encodings`` for ``valid``.
    """
    kind = runtime_kind(runtime)
    latency = LatencyRequest(turns, batch_size, threads, float_export)
    with folded(simulation) as deployed:  # as the files are: so are the float files that are made
        tokens = ValidTokens(deployed.model, valid)
        with _witnessing(deployed, Path(directory), kind, tokens, threads) as witnesses:
            with tokens.listening(), lowest_index_first(deployed.model) as ties:
                run_all(deployed.model, data, forward=tokens.forward(forward), most_uncounted=None, label="verifying",
                        progress=progress)
            _refuse_other_calls(witnesses)
            witnesses[0].notes += ties.findings()
            for witness in witnesses:
                witness.stop()
                if latency.turns and kind.untimed is None:
                    witness.measure(latency, progress=progress)
            tokens.warn_of_unfollowed({quantizer: site.name for site, quantizer in deployed.quantizers.items()
                                       if not quantizer.static})
            with lowest_index_first(deployed.model):
                verdicts = tuple(witness.verdict() for witness in witnesses)
            return verdicts[0] if len(verdicts) == 1 else _of_islands(Path(directory), witnesses, verdicts)


def _refuse_other_calls(witnesses: Sequence[_Witness]) -> None:
    """Raises: CalibrationError if no batch was a call of the exported kind."""
    if not any(witness.is_called for witness in witnesses):
        names = ", ".join(name for witness in witnesses for name in input_names(witness.graph))
        raise CalibrationError(f"no batch is a call of the kind that was exported, with the inputs {names}")


@dataclass(frozen=True, slots=True)
class LatencyRequest:
    """The latency that is to be measured.

    Args:
        turns: how often each runtime runs for the median; 0: it is not measured.
        batch_size: the rows that it is of; all of the first batch where a file does not run on so many.
        threads: threads within an op; ``None`` leaves the number to the runtime.
        float_export: a directory with float exports of the same files, or the file, to be measured beside them.

    Raises: ExportError if the rows or the threads are below 1.
    """

    turns: int = TURNS
    batch_size: int = 1
    threads: int | None = None
    float_export: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        for name, number in (("batch_size", self.batch_size), ("threads", self.threads)):
            if number is not None and number < 1:
                raise ExportError(f"{name} must be at least 1; got {number}")


USUAL_LATENCY = LatencyRequest()
"""The latency of one row."""


@contextmanager
def _witnessing(
    simulation: Simulation, directory: Path, kind: RuntimeKind, tokens: ValidTokens, threads: int | None
) -> Iterator[list[_Witness]]:
    """While active, each exported file runs on the inputs of every call of its graph.

    Raises: ExportError if a file is missing or does not run.
    """
    graphs = roots(simulation.model)
    exported = {"": graphs[""]} if "" in graphs else graphs
    files = {directory / kind.file_name(path): graph for path, graph in exported.items()}
    missing = next((path for path in files if not path.exists()), None)
    if missing is not None:
        raise ExportError(f"{directory} holds no {missing.name} to verify; export with formats=({kind.format!r},)")
    reasons = {site.name: reason for site, reason in simulation.plan.unquantized.items()}
    witnesses: list[_Witness] = []
    try:
        for path, graph in files.items():
            witnesses.append(_Witness(graph, path, kind, reasons, tokens, threads))
        yield witnesses
    finally:
        for witness in witnesses:
            witness.close()


def _of_islands(directory: Path, witnesses: list[_Witness], verdicts: tuple[Verdict, ...]) -> Verdict:
    """The verdict on several files together."""
    from qtk.runtimes.file_runs import merged_runs

    runs = merged_runs([witness.files for witness in witnesses])
    findings = tuple(
        Finding(finding.level, f"{verdict.path.name}: {finding.cause}", finding.remedy)
        for verdict in verdicts for finding in verdict.findings
    )
    floats = [verdict.float_size_bytes for verdict in verdicts]
    return Verdict(
        directory, SIMULATION, runs, findings, sum(verdict.size_bytes for verdict in verdicts),
        sum(size or 0 for size in floats) if None not in floats else None, verdicts,
        timing=witnesses[0].files.timing,
    )


def _circumstances(graph: CapturedGraph, file: Path, kind: RuntimeKind) -> Circumstances:
    """Returns what the file of a simulated graph is, and where it runs."""
    has_minifloats = any(
        isinstance(module, Quantizer) and module.mode is Mode.SIMULATE and isinstance(module.spec.dtype, FloatDtype)
        for module in graph.modules()
    )
    is_half = any(parameter.dtype is torch.float16 for parameter in graph.parameters())
    return Circumstances(kind.name, integer_sums_saturate(), kind.saturating(file), has_minifloats, is_half)


def runtime_kind(runtime: str) -> RuntimeKind:
    """The runtime of a name. Raises: ExportError if there is none, or it is not installed."""
    if runtime not in RUNTIMES:
        raise ExportError(f"unknown runtime {runtime!r}; choose from {', '.join(RUNTIMES)}")
    kind = RUNTIMES[runtime]
    kind.require()
    return kind


def float_file(float_export: str | os.PathLike[str], file: Path) -> Path:
    """The float export of ``file``, which is ``float_export`` or in it. Raises: ExportError if there is none."""
    given = Path(float_export)
    found = given / file.name if given.is_dir() and given.suffix != file.suffix else given
    if not found.exists():
        raise ExportError(f"there is no float export {found}; leave float_export out, or name the file or its folder")
    return found


def size_bytes(file: Path) -> int:
    """Size of a file, of an ONNX file with its external data, or of a directory that is one file of a runtime."""
    parts = file.rglob("*") if file.is_dir() else (file, file.with_name(f"{file.name}.data"))
    return sum(path.stat().st_size for path in parts if path.is_file())



class _Witness:
    """Runs the file of a graph on the inputs of each call of the graph, and compares outputs and sites."""

    def __init__(
        self, graph: CapturedGraph, path: Path, kind: RuntimeKind, reasons: Mapping[str, str], tokens: ValidTokens,
        threads: int | None,
    ) -> None:
        self.graph, self.path, self.kind, self.tokens = graph, path, kind, tokens
        self.first_counted: list[Tensor | None] = []
        self.judged: tuple[Call, list[Tensor], list[Tensor | None]] | None = None
        self.is_finite = True
        self.first_call: Call | None = None
        self.is_called = False
        self.inputs: dict[str, Tensor] = {}
        self.notes: list[Finding] = []
        self.float_bytes: int | None = None
        if bfloat16 := values_of(graph, torch.bfloat16):
            raise ExportError(f"{path} cannot be run: {', '.join(bfloat16)} are bfloat16; {NO_BFLOAT16}")
        try:
            self.files = kind.open(path, reasons, threads)
        except ExportError:
            raise
        except Exception as error:
            remedy = bfloat16_remedy(graph)
            raise ExportError(f"{path}: {kind.title} cannot load it: {error}"
                              f"{'' if remedy is None else f'; {remedy}'}") from error
        self.quantizers = [quantizer_called(node) for node in file_signature(graph).outputs.values()]
        self.simulated = SimulatedValues(graph, self.files.steps, tokens)
        self.calls: list[Call] = []
        self.handles = [
            graph.register_forward_pre_hook(self._enter, with_kwargs=True),
            graph.register_forward_hook(self._compare, with_kwargs=True),
        ]

    def stop(self) -> None:
        """Removes the hooks; the runs stay."""
        for handle in self.handles:
            handle.remove()
        self.simulated.close()

    def close(self) -> None:
        self.stop()
        self.files.close()

    def measure(self, latency: LatencyRequest, *, progress: bool) -> None:
        """Measures size and latency of the float file, which is made if it is not given."""
        if self.first_call is None:
            return
        if latency.float_export is not None:
            float_file(latency.float_export, self.path)
        with tempfile.TemporaryDirectory(prefix="qtk-") as folder:
            try:
                file = self._float_file(Path(folder), latency.float_export)
                self.float_bytes = size_bytes(file)
                self.files.measure(self.inputs, file, turns=latency.turns, progress=progress,
                                   batch_size=latency.batch_size)
            except ExportError as error:
                self.notes.append(Finding(Level.YELLOW, f"no latency: {error}", "pass float_export="))

    def verdict(self) -> Verdict:
        if not self._agrees():
            self._run_ops()
        runs = self.files.runs()
        circumstances = _circumstances(self.graph, self.path, self.kind)
        found: Sequence[Finding] = self.kind.judge(runs, replace(circumstances, tolerances_db=self._tolerances()))
        far = [] if self.judged is None else far_from_float(self.graph, *self.judged, self.files.outputs)
        if any(finding.level is Level.RED for finding in far) and all(run.total is not None for run in runs):
            found = [finding for finding in found if finding.level is not Level.RED]  # nobody can compare with NaN
        findings = sorted((*far, *found), key=lambda finding: finding.level is not Level.RED)
        return Verdict(self.path, SIMULATION, runs, (*findings, *self.notes), size_bytes(self.path), self.float_bytes,
                       timing=self.files.timing)

    def _tolerances(self) -> tuple[float, ...]:
        """The SQNR that each output of a right file may have; computed where a run does not have a high one."""
        if self.first_call is None or self._agrees():
            return ()
        expected = tensor_outputs(self.graph, self.first_call)
        return tolerances_db(self.graph, self.first_call, expected, self.first_counted)

    def _agrees(self) -> bool:
        return all(agrees(run) for run in self.files.runs() if run.total is not None)

    def _run_ops(self) -> None:
        """Runs the ops of the file on what the simulation computes in the first call."""
        if self.first_call is not None:
            simulated = SimulatedValues(self.graph, self.files.steps)
            try:
                outputs = tensor_outputs(self.graph, self.first_call)
                values = simulated.take()
            finally:
                simulated.close()
            self.files.run_ops(self.inputs, self._references(outputs), values)

    def _references(self, outputs: Sequence[Tensor]) -> list[SimulatedValue]:
        if len(outputs) != len(self.quantizers):
            return [SimulatedValue(value) for value in outputs]
        return [SimulatedValue(value, step_of(each, value))
                for value, each in zip(outputs, self.quantizers, strict=True)]

    def _float_file(self, folder: Path, given: str | os.PathLike[str] | None) -> Path:
        if given is not None:
            return float_file(given, self.path)
        assert self.first_call is not None
        quantizers = [module for module in self.graph.modules() if isinstance(module, Quantizer)]
        with in_mode(quantizers, Mode.BYPASS):
            self.kind.write_float(self.graph, self.first_call, folder / self.path.name)
        return folder / self.path.name

    def _enter(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        self.calls.append(Call(args, kwargs, None, buffers=buffer_values(self.graph)))

    def _compare(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], outputs: object
    ) -> None:
        self.is_called, call = True, self.calls.pop()
        inputs, simulated = file_inputs(self.graph, call), file_outputs(self.graph, outputs)
        counted = [self.tokens.counted_of_output(value) for value in simulated]
        compared = [
            replace(each, counted=which) for each, which in zip(self._references(simulated), counted, strict=True)
        ]
        self.files.compare(inputs, compared, self.simulated.take())
        was_finite = self.is_finite
        self.is_finite = was_finite and all(bool(value.isfinite().all()) for value in simulated)
        if self.judged is None or self.is_finite is not was_finite:  # the first call, or the first with NaN
            self.judged = call, [value.detach().clone() for value in simulated], counted
        if self.first_call is None and all(tensor.numel() for tensor in inputs.values()):
            self.first_call, self.inputs, self.first_counted = call, inputs, counted
