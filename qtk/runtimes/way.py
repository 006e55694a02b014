"""One way to run an exported file in a runtime, and what it computes compared with reference values."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from qtk.analysis.simulated_values import SimulatedValue
from qtk.errors import ExportError
from qtk.numerics.top1 import Top1
from qtk.report.difference import Difference
from qtk.report.runtime_nodes import RuntimeNodes
from qtk.report.timing import OpTime, Timing
from qtk.report.verdict import FileRun
from qtk.runtimes.difference_sums import DifferenceSums

SiteValues = Mapping[tuple[str, int], SimulatedValue]
"""Site and ordinal of its node in the file → value."""

Runner = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
"""Inputs by name → values by name."""

OTHER_SIMULATION = "verify a file with the simulation it was exported from"


def refuse_other_outputs(count: int, wanted: int) -> None:
    """Raises: ExportError if a file returns another number of tensors than the model."""
    if count != wanted:
        raise ExportError(f"the file returns {count} tensors, the model {wanted}; {OTHER_SIMULATION}")


class Codes(Protocol):
    """What of a file's inputs and outputs is codes."""

    def stored(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Inputs by name, as the file takes them, of float ones."""

    def reals(self, output: str, value: Tensor) -> Tensor:
        """Returns what the file returns as an output, in float."""


class NoCodes:
    """A file that takes and returns floats."""

    def stored(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(inputs)

    def reals(self, output: str, value: Tensor) -> Tensor:
        return value


class SiteValue(Protocol):
    """A site whose value a way returns: its name, the ordinal of its node, and the name among the values."""

    @property
    def site(self) -> str: ...
    @property
    def step(self) -> int: ...
    @property
    def name(self) -> str: ...

    def like(self, value: Tensor, reference: Tensor) -> Tensor | None:
        """The dequantized values in the layout of a reference; ``None`` if they have no such layout."""


class Way:
    """One way to run the file, and the differences so far.

    Args:
        way: its name in the verdict.
        runtime: the runtime and its settings.
        runners: each returns values by name; where several return one, the first counts.
        codes: what of its inputs and outputs the runners take and return as codes.
        sites: the sites among these values.
        refusal: why the runtime does not run the file.
    """

    def __init__(
        self, way: str, runtime: str, runners: list[Runner], codes: Codes, sites: Sequence[SiteValue] = (),
        refusal: str | None = None,
    ) -> None:
        self.way, self.runtime, self.runners, self.codes, self.refusal = way, runtime, runners, codes, refusal
        self.sites: list[SiteValue] = list(sites)
        self.nodes: RuntimeNodes | None = None
        self.top1 = Top1()
        self.output_sums: dict[int, DifferenceSums] = {}
        self.site_sums: dict[str, DifferenceSums] = {}
        self.ops: tuple[Difference, ...] | None = None
        self.slowest: tuple[OpTime, ...] = ()
        self.latency_ms: float | None = None
        self.float_latency_ms: float | None = None

    def values(self, feed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns what it computes, by name. Raises: ExportError if it does not run."""
        values, stored = dict[str, Tensor](), self.codes.stored(feed)
        for run in reversed(self.runners):
            try:
                values |= run(stored)
            except Exception as error:
                raise ExportError(f"{self.runtime} cannot run the file: {type(error).__name__}: {error}") from error
        return values

    def add(
        self, names: Sequence[str], outputs: Sequence[SimulatedValue], sites: SiteValues, values: Mapping[str, Tensor]
    ) -> None:
        for index, (name, reference) in enumerate(zip(names, outputs, strict=True)):
            ours, theirs = reference.value, self.codes.reals(name, values[name])
            if ours.shape != theirs.shape:
                raise ExportError(f"{self.runtime}: output {index} has shape {tuple(theirs.shape)}, the simulation's "
                                  f"{tuple(ours.shape)}")
            self.output_sums.setdefault(index, DifferenceSums(name)).add(reference, theirs)
            if index == 0 and ours.ndim > 1 and ours.shape[-1] > 1:
                self.top1.add(_scores(ours.detach(), reference), _scores(theirs, reference).argmax(-1))
        for site in self.sites:
            if (site.site, site.step) in sites:
                reference = sites[site.site, site.step]
                value = site.like(values[site.name], reference.value)
                if value is not None:
                    self.site_sums.setdefault(site.site, DifferenceSums(site.site)).add(reference, value)

    def result(self, unseen_sites: int) -> FileRun:
        total = None if self.refusal else DifferenceSums.total(self.output_sums.values(), "outputs").difference()
        return FileRun(
            self.way, self.runtime, total, self.top1.share,
            tuple(sums.difference() for sums in self.output_sums.values()),
            tuple(sums.difference() for sums in self.site_sums.values()),
            self.nodes, self.latency_ms, self.float_latency_ms, self.refusal, unseen_sites,
            self.ops, self.slowest,
        )


class Runs(Protocol):
    """The runs of a file in all ways of a runtime."""

    @property
    def timing(self) -> Timing | None:
        """Returns what the latencies are of; ``None`` if they were not measured."""

    @property
    def outputs(self) -> Sequence[str]:
        """The names of the outputs."""

    @property
    def ways(self) -> Sequence[Way]:
        """The ways, with the differences so far."""

    @property
    def steps(self) -> Mapping[str, int]:
        """Site → the ordinal of its last node in the file, of the sites whose values a way returns."""

    @property
    def unseen_sites(self) -> int:
        """The number of sites whose values no way returns, because they are in the bodies of loops."""

    def compare(self, inputs: Mapping[str, Tensor], outputs: Sequence[SimulatedValue], sites: SiteValues) -> None:
        """Runs the file in every way, and adds up the differences from the reference values."""

    def run_ops(self, inputs: Mapping[str, Tensor], outputs: Sequence[SimulatedValue], sites: SiteValues) -> None:
        """Runs each op on reference values, where the runtime can."""

    def runs(self) -> tuple[FileRun, ...]:
        """Every run, compared with what was given so far."""

    def measure(self, inputs: Mapping[str, Tensor], float_file: Path | None, *, turns: int, progress: bool,
                batch_size: int = 1) -> None:
        """Measures the latency, and the latency of the float file."""

    def close(self) -> None:
        """Frees what the runs hold."""


def _scores(values: Tensor, reference: SimulatedValue) -> Tensor:
    """The rows along the last axis in which an element counts, without the elements that do not."""
    values = values.cpu()
    if reference.counted is None:
        return values
    counted = reference.counted.cpu()
    lowest = -torch.inf if values.is_floating_point() else torch.iinfo(values.dtype).min
    return values.masked_fill(~counted, lowest)[counted.any(-1)]


def shapes_of(feed: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in feed.items())


def rows_along(value: Tensor, axis: int | None, count: int) -> Tensor:
    """``count`` rows of ``value`` along an axis, again and again the same if it has fewer; all of it without an axis.

    >>> rows_along(torch.tensor([[1, 2]]), 1, 3), rows_along(torch.tensor([[1, 2]]), None, 3)
    (tensor([[1, 2, 1]]), tensor([[1, 2]]))
    """
    if axis is None:
        return value
    return value.index_select(axis, torch.arange(count, device=value.device) % max(value.shape[axis], 1))


def usable_cpus() -> int:
    """The CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
