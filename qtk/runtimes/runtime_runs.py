"""Runs an exported file in one runtime, in each of its ways, and compares what it computes with reference values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from qtk.analysis.simulated_values import SimulatedValue
from qtk.errors import ExportError, first_line
from qtk.report.timing import Timing
from qtk.report.verdict import FileRun
from qtk.runtimes.latency import median_latencies_ms
from qtk.runtimes.loaded_file import LoadedFile, SiteRows, rows_like
from qtk.runtimes.way import (
    OTHER_SIMULATION,
    NoCodes,
    SiteValues,
    Way,
    refuse_other_outputs,
    rows_along,
    shapes_of,
    usable_cpus,
)

Opener = Callable[[Path, Mapping[str, str], int], LoadedFile]
"""Loads a file: its path, name of a site that is not quantized → why, and the number of threads (0: the runtime's)."""

FLOAT = "float"


class RuntimeRuns:
    """The runs of one file in a runtime.

    Args:
        file: the file.
        reasons: name of a site that is not quantized → why.
        ways: name of a way → what loads a file so; the first is the way that the runtime comes with.
        threads: threads of every run; ``None`` leaves the number to the runtime.

    Raises: ExportError if the runtime is not installed, or does not load the file in any of the ways.
    """

    def __init__(
        self, file: Path, reasons: Mapping[str, str], ways: Mapping[str, Opener], *, threads: int | None = None
    ) -> None:
        self.file, self.threads = file, threads
        self.timing: Timing | None = None
        self._openers, self._loaded = ways, dict[str, LoadedFile]()
        self.ways: list[Way] = []
        for name, load in ways.items():
            way = Way(name, name, [], NoCodes())
            try:
                loaded = self._loaded[name] = load(file, reasons, threads or 0)
            except ExportError as error:
                way.refusal = str(error)
            else:
                way.runtime = loaded.runtime
                way.sites = [SiteRows(site) for site in loaded.sites]
            self.ways.append(way)
        if not self._loaded:
            raise ExportError(self.ways[0].refusal)
        first = next(iter(self._loaded.values()))
        self.inputs, self.outputs = [*first.inputs], [*first.outputs]
        self.steps = {site: 0 for loaded in self._loaded.values() for site in loaded.sites}

    unseen_sites = 0

    def close(self) -> None:
        """Frees what the runtime holds."""
        self._loaded = {}

    def compare(self, inputs: Mapping[str, Tensor], outputs: Sequence[SimulatedValue], sites: SiteValues) -> None:
        """Runs the file in every way, and adds up the differences from the reference values.

        Raises: ExportError if the file has other inputs or outputs, or runs in none of the ways.
        """
        feed = self._feed(inputs)
        refuse_other_outputs(len(self.outputs), len(outputs))
        for way in self.ways:
            if way.refusal is None:
                try:
                    rows = self._loaded[way.way].run(feed, sites=True)
                except Exception as error:  # whatever the runtime says
                    way.refusal = first_line(error)
                else:
                    way.add(self.outputs, outputs, sites, self._joined(rows, outputs, way))
        if all(way.refusal is not None for way in self.ways):
            raise ExportError(f"{self.file}: {self.ways[0].runtime} does not run it: {self.ways[0].refusal}")

    def runs(self) -> tuple[FileRun, ...]:
        """Every run, compared with what was given so far."""
        for way in self.ways:
            way.nodes = None if way.refusal is not None else self._loaded[way.way].nodes()
        return tuple(way.result(self.unseen_sites) for way in self.ways)

    def run_ops(self, inputs: Mapping[str, Tensor], outputs: Sequence[SimulatedValue], sites: SiteValues) -> None:
        """Of these runtimes no file is cut at its sites: nothing is known of single ops."""

    def measure(
        self, inputs: Mapping[str, Tensor], float_file: Path | None, *, turns: int, progress: bool, batch_size: int = 1,
    ) -> None:
        """Measures the latency of the first way, and of the float file in it if there is one.

        On ``batch_size`` rows of the inputs, again and again the same rows where there are fewer; rows are the items of
        the first input along its axis 0, and of the others along the first axis that is as long.
        """
        given = self._feed(inputs)
        rows = next((len(value) for value in given.values() if value.ndim), None)
        axes = {name: next((axis for axis, size in enumerate(value.shape) if size == rows), None)
                for name, value in given.items()}
        feed = {name: rows_along(value, axes[name], batch_size) for name, value in given.items()}
        first = next(way for way in self.ways if way.refusal is None)
        try:
            self._loaded[first.way].run(feed)
        except Exception:  # whatever the runtime says: the rows belong together
            feed = given
        else:
            rows = None if rows is None else batch_size
        self.timing = Timing(batch_size, rows, self.threads, usable_cpus(), shapes_of(feed))
        runners: dict[str, Callable[[], object]] = {first.way: self._loaded[first.way].timed(feed)}
        if float_file is not None:
            in_float = self._openers[first.way](float_file, {}, self.threads or 0)
            runners[FLOAT] = in_float.timed(dict(zip(in_float.inputs, feed.values(), strict=True)))
        latencies = median_latencies_ms(runners, turns=turns, progress=progress)
        first.latency_ms, first.float_latency_ms = latencies[first.way], latencies.get(FLOAT)

    def _joined(self, rows: Mapping[str, Tensor], outputs: Sequence[SimulatedValue], way: Way) -> dict[str, Tensor]:
        """The values of the calls together, where the outputs are like the references."""
        values = dict(rows)
        for name, reference in zip(self.outputs, outputs, strict=True):
            joined = rows_like(rows[name], reference.value)
            if joined is None:
                raise ExportError(f"{way.runtime}: {name} has {rows[name].numel()} values, the model's output "
                                  f"{reference.value.numel()}; {OTHER_SIMULATION}")
            values[name] = joined
        return values

    def _feed(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return inputs_of_file(self.inputs, inputs)


def inputs_of_file(names: Sequence[str], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inputs under the names of a file, by these names or else in order.

    Raises: ExportError if the file takes another number of inputs.

    >>> import torch
    >>> inputs_of_file(["args_0"], {"x": torch.zeros(2)})
    {'args_0': tensor([0., 0.])}
    """
    if len(inputs) != len(names):
        raise ExportError(f"the file takes {', '.join(names)}, the model {', '.join(inputs)}; {OTHER_SIMULATION}")
    if set(inputs) == set(names):
        return {name: inputs[name] for name in names}
    return dict(zip(names, inputs.values(), strict=True))
