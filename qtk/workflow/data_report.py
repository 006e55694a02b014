"""Reports whether calibration data are enough: ranges and predictions against the number of batches, odd batches."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from qtk.algorithms.odd_rows import LEAST, LIMIT, odd_rows
from qtk.analysis.float_outputs import FloatOutputs, sqnr_db
from qtk.calibration.calibrate import CalibrationData
from qtk.calibration.reached_matrices import matrices_met
from qtk.core.plan import leaders
from qtk.data.forward_pass import Batch, Forward, in_memory, outputs
from qtk.data.sequences import apart, like
from qtk.data.synthetic_batches import SyntheticBatches
from qtk.data.valid_tokens import Valid, ValidTokens
from qtk.graph.channel_axis import channel_axis
from qtk.graph.flow import Flow
from qtk.graph.graphs import graphs
from qtk.graph.insert import quantizer_called
from qtk.graph.simulation import Simulation
from qtk.layerwise.float_weights import FloatWeights
from qtk.quantizers.modes import in_mode
from qtk.quantizers.quantizer import Mode, Quantizer
from qtk.report.data_report import CalibrationSize, DataReport, OddBatch
from qtk.torch_private import pytree
from qtk.transforms.rewrite import Configurable
from qtk.workflow.compute_encodings import compute_encodings

HOLDOUT = 0.25
"""Share of the batches that judge."""

STATISTICS = ("mean", "standard deviation", "least value", "largest value", "deviation between samples")

LEADING = 2
"""The axes [samples, tokens], of which rows are made where tokens do not count."""

SETTLED, SETTLED_DB = 0.005, 0.5
"""Share of the predictions that may be others, and decibels that the error may be larger, without a change."""


def data_report(
    sim: Configurable, data: Iterable[Batch], *, forward: Forward | None = None, num_batches: int | None = None,
    progress: bool = True, valid: Valid | None = None,
) -> DataReport:
    """Calibrates copies of the simulation with 1, 2, 4, … batches and compares what they compute with all batches.

    >>> import qtk
    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    >>> batches = list(torch.randn(12, 32, 8))
    >>> sim = qtk.QuantSim(model, batches[0])
    >>> batches[7] = 20 * batches[7]
    >>> report = sim.data_report(batches, progress=False)
    >>> [each.index for each in report.odd], [each.batches for each in report.sizes]
    ([7], [1, 2, 4, 8, 9])

    The last quarter of the batches judges. Encodings of activations are computed with the scheme of the simulation,
    the encodings of weights once; frozen ones stay. A batch stands out if mean, deviations and extremes of its float
    values at the sites are far from the median batch (``qtk.algorithms.odd_rows``).

    Args:
        sim: a ``QuantSim``, calibrated or not; it stays as it is.
        data: the batches to calibrate with, which are kept in memory.
        forward: as for ``compute_encodings``.
        num_batches: as for ``compute_encodings``.
        progress: show bars.
        valid: as for ``compute_encodings``.

    Raises: CalibrationError for fewer than two batches, or as ``compute_encodings``.
    """
    batches = in_memory(data, num_batches, least=2, why="the last ones judge")
    seen = _Seen(sim.simulation, ValidTokens(sim.simulation.model, valid))
    with seen.listening():
        for _ in outputs(sim.simulation.model, batches, forward=seen.tokens.forward(forward), label="reading",
                         progress=progress):
            seen.end_batch()
    calibration, judges = apart(batches, HOLDOUT)
    trial = copy.deepcopy(sim)
    with in_mode(list(sim.simulation.quantizers.values()), Mode.BYPASS), FloatWeights(sim.simulation).in_place():
        expected = FloatOutputs(sim.simulation.model, judges, forward, valid)
    items = list(calibration)
    counts = [*(1 << power for power in range(len(items).bit_length()) if 1 << power < len(items)), len(items)]
    sizes: list[CalibrationSize] = []
    last: list[Tensor | None] = []
    for count in reversed(counts):
        used = CalibrationData(like(calibration, items[:count]), None, forward, None, progress, valid)
        sites = None if count == len(items) else seen.names
        compute_encodings(trial, used, sites=sites, only_missing=False)
        predictions = [predictions_of(each) for each in outputs(trial.simulation.model, judges, forward=forward)]
        last = last or predictions
        sizes.append(CalibrationSize(count, sum(map(_samples, items[:count])), seen.range_share(count, len(items)),
                                     sqnr_db(expected.error(trial.simulation.model)), _changed(predictions, last)))
    sizes.reverse()
    source = data.made_from if isinstance(data, SyntheticBatches) else ""
    judged = sum(len(each) for each in last if each is not None)
    return DataReport(tuple(sizes), recommended(sizes, judged), tuple(seen.odd()), seen.silent(), seen.experts,
                      len(judges), source)


def recommended(sizes: list[CalibrationSize], predictions: int) -> int | None:
    """The least number of batches from which on predictions, or the error where there are none, change no more.

    ``None`` if that is the last number, as where there is only one: nobody knows what more batches would change.
    ``predictions``: how many judge, of which one may change.
    """
    last = sizes[-1]

    def is_settled(each: CalibrationSize) -> bool:
        if each.changed is None:
            return each.sqnr_db >= last.sqnr_db - SETTLED_DB
        return each.changed <= SETTLED or each.changed * predictions < 1.5

    unsettled = [index for index, each in enumerate(sizes) if not is_settled(each)]
    first = unsettled[-1] + 1 if unsettled else 0
    return None if first == len(sizes) - 1 else sizes[first].batches


class _Seen:
    """Statistics of the float values at each site, batch by batch.

    Args:
        simulation: whose quantizers are listened to.
        tokens: which of its tokens count.
    """

    def __init__(self, simulation: Simulation, tokens: ValidTokens) -> None:
        self._simulation, self.tokens = simulation, tokens
        sites = [site for site in leaders(simulation.plan) if not simulation.plan[site].static]
        self.names = [site.name for site in sites]
        self._quantizers = {simulation.quantizers[site]: index for index, site in enumerate(sites)}
        self._axes: dict[nn.Module, int] = dict(_channel_axes(simulation.model))
        self._parts: dict[int, list[tuple[float, ...]]] = defaultdict(list)
        self._rows: list[list[tuple[float, ...]]] = []
        self._largest: dict[int, Tensor] = {}
        self.experts: dict[str, tuple[int, ...]] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While active, the model computes in float, and its values are noted."""
        handles = [quantizer.register_forward_pre_hook(self._record) for quantizer in self._quantizers]
        try:
            with (
                in_mode(list(self._simulation.quantizers.values()), Mode.BYPASS),
                FloatWeights(self._simulation).in_place(), self.tokens.listening(),
                matrices_met(self._simulation) as counts,
            ):
                yield
        finally:
            for handle in handles:
                handle.remove()
        self.experts = {name: tuple(int(each) for each in rows) for name, rows in counts.items()}

    def end_batch(self) -> None:
        """Ends a batch: what was noted since the last one is of it."""
        self._rows.append([_joined(self._parts[index]) for index in range(len(self.names))])
        self._parts.clear()

    def range_share(self, count: int, total: int) -> float:
        """The mean over the sites of the range in the first ``count`` batches over that in the first ``total``."""
        low, high = (torch.tensor([[site[index] for site in row] for row in self._rows]).double() for index in (2, 3))
        some, every = ((high[:each].amax(0) - low[:each].amin(0)) for each in (count, total))
        known = every > 0
        return float((some[known] / every[known]).nan_to_num(0.0).mean()) if bool(known.any()) else 1.0

    def odd(self) -> Iterator[OddBatch]:
        """The batches that stand out, the oddest first."""
        if len(self._rows) < LEAST:
            return
        table = torch.tensor(self._rows, dtype=torch.float64).flatten(1)
        scores, farthest = odd_rows(table)
        for index in scores.argsort(descending=True).tolist():
            if float(scores[index]) <= LIMIT:
                return
            column = int(farthest[index])
            what = (f"{STATISTICS[column % len(STATISTICS)]} {float(table[index, column]):.3g} beside "
                    f"{float(table[:, column].nanmedian()):.3g}")
            yield OddBatch(index, float(scores[index]), self.names[column // len(STATISTICS)], what)

    def silent(self) -> dict[str, tuple[int, ...]]:
        """Site of values that are never negative → its channels that are 0 in all samples."""
        found = {}
        for index, largest in self._largest.items():
            channels = (largest == 0).nonzero().flatten().tolist()
            if channels and len(channels) < len(largest) and min(row[index][2] for row in self._rows) == 0:
                found[self.names[index]] = tuple(channels)
        return found

    def _record(self, quantizer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(quantizer, Quantizer)
        index, x = self._quantizers[quantizer], self.tokens.rows(quantizer, inputs[0]).detach().float()
        if not x.numel():
            return
        x = x.nan_to_num(0.0, 0.0, 0.0)  # masked scores are -inf
        between = float(x.std(0, correction=0).double().mean()) * x.numel()
        self._parts[index].append((float(x.numel()), float(x.double().sum()), float(x.double().square().sum()), between,
                                   float(x.min()), float(x.max())))
        axis = self._axes.get(quantizer)
        if axis is not None and (x.ndim == inputs[0].ndim or axis >= LEADING):
            largest = x.abs().movedim(axis - inputs[0].ndim, 0).flatten(1).amax(1)
            before = self._largest.get(index)
            fits = before is None or before.shape == largest.shape
            self._largest[index] = largest if before is None or not fits else torch.maximum(before, largest)


def _channel_axes(model: nn.Module) -> Iterator[tuple[Quantizer, int]]:
    """Each quantizer of a value whose channels have an axis, and this."""
    for graph in graphs(model).values():
        flow = Flow(graph.graph)
        for node in graph.graph.nodes:
            quantizer = quantizer_called(node)
            if quantizer is not None and (axis := channel_axis(flow, node)) is not None:
                yield quantizer, axis


def _joined(parts: list[tuple[float, ...]]) -> tuple[float, ...]:
    """The ``STATISTICS`` of what a site had in a batch; NaN if it had nothing."""
    if not parts:
        return (math.nan,) * len(STATISTICS)
    count, total, squares, between = (sum(part[index] for part in parts) for index in range(4))
    mean = total / count
    deviation = math.sqrt(max(squares / count - mean**2, 0.0))
    return mean, deviation, min(part[4] for part in parts), max(part[5] for part in parts), between / count


def predictions_of(output: object) -> Tensor | None:
    """The classes with the largest scores, of the first output that has any; ``None`` if none has.

    Where no output is of floats, the integers of the first are the classes.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    if tensors and not any(leaf.is_floating_point() for leaf in tensors):
        return tensors[0].flatten().cpu()
    for leaf in tensors:
        if leaf.is_floating_point() and leaf.ndim > 1:
            axis = 1 if leaf.ndim > 3 else leaf.ndim - 1
            return leaf.argmax(axis).flatten().cpu() if leaf.shape[axis] > 1 else None
    return None


def _changed(predictions: list[Tensor | None], last: list[Tensor | None]) -> float | None:
    """The share of predictions that are others; ``None`` without any."""
    pairs = [(one, other) for one, other in zip(predictions, last, strict=True)
             if one is not None and other is not None]
    total = sum(len(one) for one, _ in pairs)
    return sum(int((one != other).sum()) for one, other in pairs) / total if total else None


def _samples(batch: object) -> int:
    leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
    return len(leaves[0]) if leaves else 1
