"""Writes a report of a simulation: one page of HTML with its errors, ranges, sensitivities and plan."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from qtk.analysis.compare import compare
from qtk.analysis.drift import drift
from qtk.analysis.float_outputs import FloatOutputs, sqnr_db
from qtk.analysis.sensitivity import sensitivity as measure_sensitivity
from qtk.atomic import write_file
from qtk.core.encoding import Encoding
from qtk.core.site import Site
from qtk.data.forward_pass import Batch, Forward, in_memory, outputs
from qtk.data.valid_tokens import Valid, ValidTokens
from qtk.errors import CalibrationError, ExportError
from qtk.graph.graphs import states_of
from qtk.graph.parameter_readers import memory_of, parameter_readers
from qtk.graph.simulation import Simulation
from qtk.layerwise.float_weights import FloatWeights
from qtk.numerics.affine import expand
from qtk.quantizers.modes import in_mode
from qtk.quantizers.quantizer import Mode, Quantizer
from qtk.report.account import Account
from qtk.report.data_report import DataReport
from qtk.report.page import ChannelRanges, Contents, decibels_text, page, require_jinja2
from qtk.report.svg import HistogramChart

T = TypeVar("T")

BINS, SHOWN_SITES, SHOWN_WEIGHTS = 60, 10, 12
MOST_SAMPLES = 2**16
"""Values of one call that a histogram takes: evenly spaced ones of the tensor."""
MOST_CHANNELS = 256
"""Channels of a weight that are drawn: the first."""


def report(
    simulation: Simulation, path: str | os.PathLike[str], data: Iterable[Batch], *, title: str,
    forward: Forward | None, num_batches: int | None, sensitivity: bool, account: Account | None,
    headline: Mapping[str, str] | None, force: bool, progress: bool, valid: Valid | None = None,
    data_name: str = "the data given", data_report: DataReport | None = None,
) -> None:
    """Writes a page of HTML to look at: errors and ranges of the sites, what each costs, and the plan.

    >>> import pathlib, qtk, tempfile
    >>> sim, batches = qtk.QuantSim(torch.nn.Linear(4, 2).eval(), torch.randn(8, 4)), [torch.randn(8, 4)]
    >>> sim.compute_encodings(batches, progress=False)
    >>> sim.report(pathlib.Path(tempfile.mkdtemp()) / "report.html", batches, progress=False)

    Args:
        simulation: calibrated.
        path: of the file.
        data: batches, which are kept in memory; a few are enough. Of a model with states the error is drawn along them.
        title: of the page.
        forward: how to run the model on a batch.
        num_batches: batches to take of the data.
        sensitivity: measure what the output loses by each site, which takes a few times as long as the rest.
        account: what was tried, of ``qtk.quantize``.
        headline: further numbers to show at the top: name → number with its unit.
        force: replace an existing file.
        progress: show bars.
        valid: which tokens count, as in ``compute_encodings``; ``None``: all.
        data_name: what ``data`` is, in words: the page says what its figures are measured on.
        data_report: whether the calibration data are enough, of ``sim.data_report``.

    Raises: ExportError if the file exists or its directory does not, or jinja2 is not installed; CalibrationError as
        ``compare``.
    """
    path = Path(path)
    _refuse_taken(path, force=force)
    require_jinja2()
    batches = in_memory(data, num_batches)
    float_weights = FloatWeights(simulation)
    notes = [] if float_weights.missing is None else [float_weights.missing]
    db = _measured("the SQNR of the outputs", lambda: _outputs_sqnr_db(
        simulation, batches, forward, float_weights, valid), notes)
    costs = None if not sensitivity else _measured("what the outputs lose by each site", lambda: measure_sensitivity(
        simulation, batches, forward=forward, progress=progress, valid=valid), notes)
    along = drift(simulation, batches, forward=forward, progress=progress) if states_of(simulation.model) else None
    errors = compare(simulation, batches, forward=forward, progress=progress, valid=valid)
    sites = {site.name: site for site in simulation.plan}
    ranked = [sites[error.site] for error in errors]
    weights = [site for site in ranked if simulation.plan[site].static][:SHOWN_WEIGHTS]
    values = _values(simulation, dict.fromkeys([*ranked[:SHOWN_SITES], *weights]), batches, forward, float_weights,
                     valid)
    tiles = {**(headline or {}), **_figures(simulation, db)}
    write_file(path, page(Contents(
        title, tiles, simulation.plan, errors,
        {site.name: _histogram(values[site], simulation.quantizers[site].encoding) for site in ranked[:SHOWN_SITES]},
        {site.name: _channels(values[site], encoding) for site in weights
         if values[site] and (encoding := simulation.quantizers[site].encoding) is not None},
        costs, along, account, tuple(notes),
        f"{len(batches)} {'batch' if len(batches) == 1 else 'batches'} of {data_name}", data_report,
    )).encode())


def _refuse_taken(path: Path, *, force: bool) -> None:
    """Raises: ExportError if a file cannot be written there, or would be replaced unasked."""
    if path.is_dir() or (path.exists() and not force):
        what = "is a directory" if path.is_dir() else "exists; pass force=True to replace it"
        raise ExportError(f"{path} {what}, or give the path of a new file, report.html")
    if not path.absolute().parent.is_dir():
        raise ExportError(f"{path.absolute().parent} is no directory; make it, or give another path")


def _figures(simulation: Simulation, db: float | None) -> dict[str, str]:
    """Name → number with its unit. ``db``: the SQNR of the outputs, if it was measured."""
    in_float, quantized = _parameter_bytes(simulation)
    return {
        **({} if db is None else {"SQNR of the outputs": decibels_text(db)}),
        "parameters, of " + _megabytes(in_float) + " in float": _megabytes(quantized),
        "sites quantized": f"{len(simulation.plan)}", "values left in float": f"{len(simulation.plan.unquantized)}",
    }


def _measured(what: str, measure: Callable[[], T], notes: list[str]) -> T | None:
    """The result, or ``None`` and a note of the reason where the model's outputs cannot be measured."""
    try:
        return measure()
    except CalibrationError as error:
        notes.append(f"Not shown: {what}. {error}")
        return None


def _outputs_sqnr_db(
    simulation: Simulation, batches: Iterable[Batch], forward: Forward | None, float_weights: FloatWeights,
    valid: Valid | None,
) -> float:
    with in_mode(list(simulation.quantizers.values()), Mode.BYPASS), float_weights.in_place():
        expected = FloatOutputs(simulation.model, batches, forward, valid)
    return sqnr_db(expected.error(simulation.model))


def _values(
    simulation: Simulation, sites: Iterable[Site], batches: Iterable[Batch], forward: Forward | None,
    float_weights: FloatWeights, valid: Valid | None,
) -> dict[Site, list[Tensor]]:
    """The float values of sites, call by call: whole of parameters, of others at most ``MOST_SAMPLES`` a call."""
    values: dict[Site, list[Tensor]] = {site: [] for site in sites}
    tokens = ValidTokens(simulation.model, valid)

    sites_of: dict[Quantizer, list[Site]] = defaultdict(list)
    for site in values:
        sites_of[simulation.quantizers[site]].append(site)

    def record(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(module, Quantizer)
        x = tokens.rows(module, inputs[0]).detach().float()
        for site in sites_of[module]:
            if not simulation.plan[site].static:
                values[site].append(x.flatten()[:: max(1, x.numel() // MOST_SAMPLES)].cpu())
            elif not values[site]:
                values[site].append(x.cpu())

    handles = [quantizer.register_forward_pre_hook(record) for quantizer in sites_of]
    try:
        with (
            in_mode(list(simulation.quantizers.values()), Mode.BYPASS), float_weights.in_place(), tokens.listening(),
        ):
            for _ in outputs(simulation.model, batches, forward=tokens.forward(forward)):
                pass
    finally:
        for handle in handles:
            handle.remove()
    return values


def _histogram(values: Sequence[Tensor], encoding: Encoding | None) -> HistogramChart:
    joined = torch.cat([value.flatten() for value in values]) if values else torch.zeros(0)
    finite = joined[joined.isfinite()]
    if not finite.numel():
        return HistogramChart(0.0, 1.0, (0,) * BINS, None)
    lowest, highest = float(finite.min()), float(finite.max())
    counts = torch.histc(finite, BINS, lowest, highest) if highest > lowest else torch.full((1,), finite.numel())
    extent = None if encoding is None else (float(encoding.minimum.min()), float(encoding.maximum.max()))
    return HistogramChart(lowest, highest, tuple(int(count) for count in counts), extent)


def _channels(values: Sequence[Tensor], encoding: Encoding) -> ChannelRanges:
    """The ranges of a weight's channels: of the axis that has scales of its own, else of the first."""
    weight = values[0]
    block_size = encoding.spec.granularity.block_size(weight.ndim)
    lengths = [size if size > 0 else length for size, length in zip(block_size, weight.shape, strict=False)]
    axis = next((axis for axis, length in enumerate(lengths) if length < weight.shape[axis]), 0)
    rows = weight.movedim(axis, 0).flatten(1) if weight.ndim > 1 else weight[:, None]
    limit = torch.maximum(expand(encoding.maximum, weight.shape, block_size),
                          -expand(encoding.minimum, weight.shape, block_size)).expand(weight.shape)
    limits = limit.movedim(axis, 0).flatten(1) if weight.ndim > 1 else limit[:, None]
    shown = [each[:MOST_CHANNELS].tolist() for each in (rows.amin(1), rows.amax(1), limits.amax(1))]
    return ChannelRanges(*map(tuple, shown))


def _parameter_bytes(simulation: Simulation) -> tuple[int, int]:
    """Bytes of all parameters, in float and with the codes of quantized parameters, scales left out."""
    readers = parameter_readers(simulation.model)
    in_float = quantized = 0
    for parameter in simulation.model.parameters():
        own = parameter.numel() * parameter.element_size()
        widths = [None if each is None else each.spec.dtype.bits for each in readers.get(memory_of(parameter), ())]
        in_float += own
        wide = [width for width in widths if width is not None]
        quantized += own if None in widths or not wide else (parameter.numel() * max(wide) + 7) // 8
    return in_float, quantized


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.2f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"
