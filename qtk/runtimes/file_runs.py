"""Runs an exported file in every way a runtime can run it, and compares what each computes with reference values."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qtk.analysis.simulated_values import SimulatedValue
from qtk.errors import ExportError
from qtk.report.findings import agrees
from qtk.report.runtime_nodes import RuntimeNodes
from qtk.report.timing import OpTime, Timing, slowest
from qtk.report.verdict import EXACT, OFF, ON, OPENVINO, FileRun
from qtk.runtimes.executed_nodes import computing_kinds, executed_nodes
from qtk.runtimes.latency import median_latencies_ms
from qtk.runtimes.op_runs import op_differences
from qtk.runtimes.op_times import op_times
from qtk.runtimes.openvino_model import OpenVinoModel, has_openvino
from qtk.runtimes.session import Optimizations, integer_sums_saturate, session_with
from qtk.runtimes.site_outputs import SiteOutput, site_outputs, sites_in_bodies, write_with_outputs
from qtk.runtimes.state_values import StateCodes
from qtk.runtimes.way import (
    OTHER_SIMULATION,
    Runner,
    Runs,
    SiteValues,
    Way,
    refuse_other_outputs,
    rows_along,
    shapes_of,
    usable_cpus,
)

if TYPE_CHECKING:
    import onnxruntime

FLOAT, FLOAT_IN_OPENVINO = "float", "float in OpenVINO"

OPTIMIZED = "on.optimized.onnx"
"""What ONNX Runtime makes of a file by default."""


class FileRuns:
    """The runs of one file. Close it when done: it holds temporary files.

    Args:
        file: the file.
        reasons: name of a site that is not quantized → why.
        threads: threads within an op of every run; ``None`` leaves the number to the runtime.

    Raises: ExportError if onnxruntime is not installed; whatever it raises for a file that it cannot load with the
        optimizations off.
    """

    def __init__(self, file: Path, reasons: Mapping[str, str], *, threads: int | None = None) -> None:
        self.file, self.reasons, self.threads = file, reasons, threads or 0
        self.timing: Timing | None = None
        self._temporary = tempfile.TemporaryDirectory(prefix="qtk-")
        self.folder = Path(self._temporary.name)
        try:
            self.codes = StateCodes(file)
            session, runtime = session_with(file, Optimizations.OFF)
            self.inputs = [(value.name, list(value.shape), str(value.type)) for value in session.get_inputs()]
            self.outputs = [value.name for value in session.get_outputs()]
            self._sites = sites = site_outputs(file, codes=False)
            self.off = Way(OFF, runtime, [self._returning(sites, Optimizations.OFF)], self.codes, sites)
            optimized = [self._optimized(ON, Optimizations.ON), self._optimized(EXACT, Optimizations.EXACT)]
            self.ways = [self.off, *optimized, *([self._openvino()] if has_openvino() else [])]
            self.steps = {site.site: site.step for site in sites}
            self.unseen_sites = sites_in_bodies(file)
        except BaseException:
            self._temporary.cleanup()
            raise

    def close(self) -> None:
        """Deletes the temporary files."""
        self.ways = []
        self._temporary.cleanup()

    def reference(self, inputs: Mapping[str, Tensor]) -> tuple[list[Tensor], dict[tuple[str, int], Tensor]]:
        """The outputs and the values of the sites with the optimizations off. Raises: ExportError as ``compare``."""
        values = self.off.values(self._feed(inputs))
        return [self.codes.reals(name, values[name]) for name in self.outputs], {
            (site.site, site.step): site.reals(values[site.name]) for site in self._sites
        }

    def compare(self, inputs: Mapping[str, Tensor], outputs: Sequence[SimulatedValue], sites: SiteValues) -> None:
        """Runs the file in every way, and adds up the differences from the reference values.

        Raises: ExportError if the file has other inputs or outputs, or does not run with the optimizations off.
        """
        feed = self._feed(inputs)
        refuse_other_outputs(len(self.outputs), len(outputs))
        for way in self.ways:
            if way.refusal is None:
                try:
                    values = way.values(feed)
                except ExportError as error:
                    if way is self.off:
                        raise
                    way.refusal = str(error)
                else:
                    way.add(self.outputs, outputs, sites, values)

    def runs(self) -> tuple[FileRun, ...]:
        """Every run, compared with what was given so far."""
        return tuple(way.result(self.unseen_sites) for way in self.ways)

    def run_ops(
        self, inputs: Mapping[str, Tensor], outputs: Sequence[SimulatedValue], sites: SiteValues
    ) -> None:
        """Runs each op on reference values, in the ways of ONNX Runtime that have no high SQNR, without and with them.

        Nothing is known of the ops of a way where the runtime refuses the file cut at its sites, or fuses other ops.
        """
        feed = self._feed(inputs)
        for way, optimizations in ((self.off, Optimizations.OFF), (self.ways[1], Optimizations.ON)):
            if way.refusal is None and not agrees(way.result(0)):
                is_on = optimizations is Optimizations.ON
                with suppress(ExportError):
                    way.ops = op_differences(
                        self.file, site_outputs(self.file, codes=is_on), feed, outputs, sites,
                        optimizations=optimizations, optimized=self.folder / OPTIMIZED if is_on else None,
                    )

    def measure(
        self, inputs: Mapping[str, Tensor], float_file: Path | None, *, turns: int, progress: bool,
        batch_size: int = 1,
    ) -> None:
        """Measures the latency of every optimized way, of the float file if there is one, and of the ops of both.

        On ``batch_size`` rows of the inputs, again and again the same ones where there are fewer; on the rows that
        there are where the file does not run on other ones, as with packed sequences. ``timing`` says which.
        """
        in_float = None
        if float_file is not None:
            in_float = partial(_run_session, session_with(float_file, Optimizations.ON, threads=self.threads)[0], [])
        feed = self._rows(self._feed(inputs), batch_size, in_float)
        runners: dict[str, Callable[[], object]] = {} if in_float is None else {FLOAT: partial(in_float, feed)}
        for way in self.ways:
            if way is not self.off and way.refusal is None and (way.way != EXACT or integer_sums_saturate()):
                runners[way.way] = partial(way.runners[0], self.codes.stored(feed))
        if OPENVINO in runners and float_file is not None:
            runners[FLOAT_IN_OPENVINO] = partial(OpenVinoModel(float_file, threads=self.threads).run, feed)
        latencies = median_latencies_ms(runners, turns=turns, progress=progress)
        for way in self.ways:
            if way.way in latencies:
                way.latency_ms = latencies[way.way]
                way.float_latency_ms = latencies.get(FLOAT_IN_OPENVINO if way.way == OPENVINO else FLOAT)
                if way.way == ON:
                    way.slowest = self._slowest(feed, float_file, turns)

    def _slowest(self, feed: Mapping[str, Tensor], float_file: Path | None, turns: int) -> tuple[OpTime, ...]:
        times = op_times(self.file, self.codes.stored(feed), turns=turns, threads=self.threads)
        if float_file is None:
            return slowest(times, None)
        in_float = op_times(float_file, feed, turns=turns, threads=self.threads)
        return slowest(times, {op: sum(ms for _, ms in nodes) for op, nodes in in_float.items()})

    def _rows(
        self, feed: Mapping[str, Tensor], batch_size: int, in_float: Callable[[Mapping[str, Tensor]], object] | None
    ) -> Mapping[str, Tensor]:
        """``batch_size`` rows of each input with a batch axis, if both files run on them; else all that there are."""
        axes = {name: shape.index("batch") for name, shape, _ in self.inputs if "batch" in shape}
        given = max((feed[name].shape[axis] for name, axis in axes.items()), default=None)
        threads, cpus = self.threads or None, usable_cpus()
        rows = {name: rows_along(value, axes.get(name), batch_size) for name, value in feed.items()}
        try:
            self.off.runners[0](self.codes.stored(rows))
            if in_float is not None:
                in_float(rows)
        except Exception:  # whatever the runtime says: the rows belong together
            self.timing = Timing(batch_size, given, threads, cpus, shapes_of(feed))
            return feed
        self.timing = Timing(batch_size, batch_size if axes else None, threads, cpus, shapes_of(rows))
        return rows

    def _feed(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        names = [name for name, _, _ in self.inputs]
        if set(names) != set(inputs):
            raise ExportError(f"the file takes {', '.join(names)}, the model {', '.join(inputs)}; {OTHER_SIMULATION}")
        return {name: inputs[name] for name in names}

    def _optimized(self, name: str, optimizations: Optimizations) -> Way:
        optimized = self.folder / (OPTIMIZED if optimizations is Optimizations.ON else "exact.optimized.onnx")
        try:
            session, runtime = session_with(
                self.file, optimizations, threads=self.threads, optimized_file=optimized
            )
        except Exception as error:
            return Way(name, f"ONNX Runtime, {name}", [], self.codes, refusal=_first_line(error))
        way = Way(name, runtime, [partial(_run_session, session, self.outputs)], self.codes)
        way.nodes = executed_nodes(optimized, self.file, self.reasons)
        if optimizations is Optimizations.ON or integer_sums_saturate():
            self._return_sites(way, optimized, optimizations)
        return way

    def _return_sites(self, way: Way, optimized: Path, optimizations: Optimizations) -> None:
        """Adds a session that also returns the codes of the sites, if that does not change what is fused."""
        sites, copy = site_outputs(self.file, codes=True), self.folder / "returning.optimized.onnx"
        try:
            runner = self._returning(sites, optimizations, optimized_file=copy)
        except Exception:  # whatever the runtime says, the file itself runs without these outputs
            return
        if sites and computing_kinds(copy) == computing_kinds(optimized):
            way.runners.append(runner)
            way.sites = [*sites]

    def _returning(
        self, sites: list[SiteOutput], optimizations: Optimizations, *, optimized_file: Path | None = None
    ) -> Runner:
        """Runs a copy of the file that returns its outputs and ``sites``."""
        copy = write_with_outputs(self.file, sites, self.folder)
        session, _ = session_with(copy, optimizations, optimized_file=optimized_file)
        return partial(_run_session, session, [value.name for value in session.get_outputs()])

    def _openvino(self) -> Way:
        try:
            model = OpenVinoModel(self.file, threads=self.threads)
        except ExportError as error:
            return Way(OPENVINO, OPENVINO, [], self.codes, refusal=_first_line(error))
        run = lambda feed: dict(zip(self.outputs, model.run(feed), strict=True))  # noqa: E731
        way = Way(OPENVINO, model.runtime, [run], self.codes)
        way.nodes = model.nodes()
        return way


def merged_runs(files: Sequence[Runs]) -> tuple[FileRun, ...]:
    """The runs of several files as if they were one: sums over their outputs, without top-1, which is of one file."""
    merged = []
    for ways in zip(*(file.ways for file in files), strict=True):
        refusal = next((way.refusal for way in ways if way.refusal), None)
        way = Way(ways[0].way, ways[0].runtime, [], ways[0].codes, refusal=refusal)
        parts = [sums for each in ways for sums in each.output_sums.values()]
        way.output_sums = dict(enumerate(parts))
        nodes = [each.nodes for each in ways if each.nodes is not None]
        if nodes:
            counts = sum((Counter(each.integer) for each in nodes), Counter())
            way.nodes = RuntimeNodes(dict(counts), tuple(node for each in nodes for node in each.floats))
        if all(each.latency_ms is not None and each.float_latency_ms is not None for each in ways):
            way.latency_ms = sum(each.latency_ms or 0.0 for each in ways)
            way.float_latency_ms = sum(each.float_latency_ms or 0.0 for each in ways)
        merged.append(way.result(sum(file.unseen_sites for file in files)))
    return tuple(merged)


def _run_session(
    session: onnxruntime.InferenceSession, names: Sequence[str], feed: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    arrays = session.run(list(names) or None, {name: tensor.detach().cpu().numpy() for name, tensor in feed.items()})
    return {name: torch.from_numpy(array) for name, array in zip(names, arrays, strict=False)}


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
