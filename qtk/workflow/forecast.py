"""A forecast of rounding or of a layer-wise run: peak memory and time, from the shapes in a model's graph alone."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, fx
from tqdm import tqdm

from qtk.calls.calls import Call
from qtk.graph.flow import Flow
from qtk.graph.graphs import graphs
from qtk.graph.insert import quantizer_called
from qtk.graph.simulation import Simulation
from qtk.layerwise.layer_selection import select_layers
from qtk.layerwise.live_values import Offload
from qtk.layerwise.method_work import OTHER, ROUNDING, WORK, multiplications
from qtk.layerwise.methods import LayerwiseMethod
from qtk.layerwise.options import DEFAULT, LayerwiseOptions
from qtk.layerwise.walk import QUANTIZED_PATHS
from qtk.layerwise.weighted_layers import WeightedLayer, weighted_layers
from qtk.moments.required_statistics import RequiredStatistics
from qtk.moments.second_moments import CARRIED, takes_less_with_weight
from qtk.nn.mapped_weights import has_mapped, is_large, readable_bytes
from qtk.numerics.im2col import weight_to_gemm
from qtk.torch_private import length_hint

FLOAT32, FLOAT64 = 4, 8
CGROUP = Path("/sys/fs/cgroup")
"""Where Linux says how much memory a container may take and has taken, files in its cache included."""

HEAP = 1.25
"""What a solve takes of the system over what it allocates, free blocks of the heap included: with it the forecasts of
``bench_larger_than_memory.py --rows forecast`` are within 13 % of the peaks."""

HELD_OUT = 2
"""Sums of the samples that are held out, and of the others."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a run takes beyond the memory in use when it begins.

    >>> print(Forecast({"values between layers": 10**9, "solving": 5 * 10**8}, 1e12).text(1e10))
    peak 1.5 GB more than now (values between layers 1.0, solving 0.5), about 2 min

    Args:
        parts: what for → bytes.
        multiplications: how many there are, each with an addition.
        uncounted: methods whose work is not known here.
    """

    parts: Mapping[str, int] = field(default_factory=dict)
    multiplications: float = 0.0
    uncounted: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """All parts together."""
        return sum(self.parts.values())

    def text(self, rate: float) -> str:
        """One line. Args: rate: multiplications in a second."""
        parts = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in self.parts.items() if size >= 5e7)
        minutes = self.multiplications / rate / 60
        lasts = f"{minutes / 60:.1f} h" if minutes >= 90 else f"{max(1, round(minutes))} min"
        more = f", and what {', '.join(self.uncounted)} takes, which is not counted" if self.uncounted else ""
        return f"peak {self.peak_bytes / 1e9:.1f} GB more than now{f' ({parts})' if parts else ''}, about {lasts}{more}"


def forecast(
    simulation: Simulation, methods: Sequence[LayerwiseMethod] = (), *, batches: int = 1, scale: float = 1.0,
    options: LayerwiseOptions = DEFAULT,
) -> Forecast:
    """The forecast of a layer-wise run; without methods of a calibration, and of rounding and writing weights.

    Args:
        simulation: its model may be on the meta device.
        methods: as for ``apply_layerwise``.
        batches: calls of the model.
        scale: elements of one call over the elements of the example inputs.
        options: of the run.

    Raises: CalibrationError if there is no layer to work on.
    """
    is_mapped, total = has_mapped(simulation.model), sum(each.numel() for each in simulation.model.parameters())
    mapped = {"weights of files": readable_bytes(simulation.model)} if is_mapped else {}
    if not methods:
        layers, _ = weighted_layers(simulation.model, simulation.plan)
        largest = max((layer.weight.numel() for layer in layers), default=0)
        parts = {**mapped, "one layer": math.ceil(ROUNDING.weights * FLOAT32 * largest)}
        forward = 0.0
        if any(not decided.static for decided in simulation.plan.values()):
            values = _values(simulation, layers, scale)
            parts["one batch"], forward = math.ceil(values.most), _forward(layers, values.rows, batches)
        return Forecast(parts, 100.0 * total + forward)
    layers, _ = select_layers(simulation, methods, None)
    paths = len(QUANTIZED_PATHS[options.inputs])
    values = _values(simulation, layers, scale)
    needed = [_needed(layer, methods, values, paths, batches, options) for layer in layers]
    held = paths * (1 if options.offload == "disk" else batches)
    there = [math.ceil(values.between.get(layer.name, 0.0) * held) for layer in layers]
    between, statistics, solving = max(
        ((own, each.statistics, each.solving) for own, each in zip(there, needed, strict=True)), key=sum)
    parts = {**mapped, "values between layers": between, "one batch": math.ceil(values.most * paths),
             "statistics": statistics, "solving": math.ceil(HEAP * solving)}
    rewrites = options.sparsity is not None or any(WORK.get(type(each), OTHER).rewrites for each in methods)
    if not is_mapped and options.keep_originals and rewrites:
        kept = sum(layer.weight.numel() * layer.weight.element_size() for layer in layers)
        parts["float weights"] = 0 if options.offload == "disk" else kept
    forward = paths * _forward(layers, values.rows, batches)
    uncounted = tuple(type(method).__name__ for method in methods if type(method) not in WORK)
    return Forecast(parts, forward + sum(each.multiplications for each in needed), uncounted)


def _forward(layers: Sequence[WeightedLayer], rows: Mapping[str, float], batches: int) -> float:
    """Multiplications of the layers in all calls."""
    return sum(layer.weight.numel() * rows[layer.name] * batches for layer in layers)


@dataclass(frozen=True, slots=True)
class _Needed:
    """Bytes and multiplications of one layer."""

    statistics: int
    solving: int
    multiplications: float


@dataclass(frozen=True, slots=True)
class _Values:
    """What layers meet, by name, in one call.

    Args:
        rows: that a layer reads.
        between: bytes of the values there are before it.
        most: bytes of the values there are while ops run.
        alone: layers that read their input alone, and once.
    """

    rows: Mapping[str, float]
    between: Mapping[str, float]
    most: float
    alone: Set[str]


def _needed(
    layer: WeightedLayer, methods: Sequence[LayerwiseMethod], values: _Values, paths: int, batches: int,
    options: LayerwiseOptions,
) -> _Needed:
    groups, outputs, columns = weight_to_gemm(layer.weight.detach(), layer.geometry).shape
    required = RequiredStatistics.union([method.required_statistics(_block(layer, columns)) for method in methods])
    block = required.block or columns
    is_alone = layer.name in values.alone and groups == 1 and block == columns
    of_weight = is_alone and takes_less_with_weight(outputs, columns)
    cross = 0 if paths == 1 else outputs if of_weight else block
    sums = groups * columns * (block * (1 + required.difference) + cross) if required.gram else 0
    sums *= HELD_OUT if options.holdout else 1
    size = FLOAT32 if batches < CARRIED else FLOAT32 + FLOAT64
    work = [WORK.get(type(method), ROUNDING) for method in methods]
    grams, weights = max(each.grams for each in work), max(each.weights for each in work)
    solving = FLOAT32 * groups * (grams * columns * block + weights * outputs * columns)
    solved, rows = multiplications(work, groups, outputs, columns, block), values.rows[layer.name] * batches
    return _Needed(sums * size, math.ceil(solving), solved + rows * columns * block * (0.5 + (paths > 1)))


def _block(layer: WeightedLayer, columns: int) -> int | None:
    """Columns that share a scale; ``None``: all do."""
    sizes = layer.quantizer.spec.granularity.block_size(layer.weight.ndim)
    size = sizes[-1] if sizes else -1
    return size if 1 < size < columns else None


def _values(simulation: Simulation, layers: Sequence[WeightedLayer], scale: float) -> _Values:
    rows, between, most, readers = dict[str, float](), dict[str, float](), 0.0, dict[fx.Node, list[str]]()
    sites = {layer.name: layer for layer in layers}
    for place, graph in graphs(simulation.model).items():
        flow = Flow(graph.graph)
        stops: dict[fx.Node, list[str]] = {}
        for node in graph.graph.nodes:
            row = flow.row(node)
            data = None if row is None or row.data_arg is None else node.args[row.data_arg]
            for port in () if row is None else flow.weight_ports(node):
                quantizer = quantizer_called(flow.root(port.value))
                layer = None if quantizer is None else sites.get(quantizer.site)
                if layer is not None and isinstance(data, fx.Node):
                    stops.setdefault(node, []).append(layer.name)
                    readers.setdefault(data, []).extend([layer.name] * (2 if place else 1))  # nested: E in any case
                    columns = weight_to_gemm(layer.weight.detach(), layer.geometry).shape[-1]
                    rows[layer.name] = rows.get(layer.name, 0.0) + scale * _elements(data) / columns
        for node, size in _live(graph.graph, flow):
            most = max(most, size * scale)
            between |= {name: max(between.get(name, 0.0), size * scale) for name in stops.get(node, ())}
    inputs = Counter(name for names in readers.values() for name in names)
    alone = {names[0] for names in readers.values() if len(names) == 1 and inputs[names[0]] == 1}
    return _Values({layer.name: rows.get(layer.name, 0.0) for layer in layers}, between, most, alone)


def _live(graph: fx.Graph, flow: Flow) -> Iterator[tuple[fx.Node, float]]:
    """Every op, with the bytes of the values that are there when it begins; what it moves counts once."""
    last = {read: node for node in graph.nodes for read in node.all_input_nodes}
    ends: dict[fx.Node, list[fx.Node]] = {}
    for read, node in last.items():
        ends.setdefault(node, []).append(read)
    held: dict[fx.Node, set[fx.Node]] = {}  # by what they were moved from
    sizes: dict[fx.Node, float] = {}
    total = 0.0
    for node in graph.nodes:
        yield node, total
        if node in last and node.op != "get_attr" and not flow.is_static(node):
            memory = flow.root(node)
            own = held.setdefault(memory, set())
            if not own:
                sizes[memory] = _bytes(node)
                total += sizes[memory]
            own.add(node)
        for read in ends.get(node, ()):
            memory = flow.root(read)
            if read in held.get(memory, ()):
                held[memory].discard(read)
                total -= 0 if held[memory] else sizes[memory]


def _elements(node: fx.Node) -> int:
    value = node.meta.get("val")
    return math.prod(map(length_hint, value.shape)) if isinstance(value, Tensor) else 0


def _bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else (value,)
    return sum(math.prod(map(length_hint, each.shape)) * each.element_size() for each in values
               if isinstance(each, Tensor))


def multiplication_rate(size: int = 1024) -> float:
    """Multiplications, each with an addition, that a product of matrices does in a second on this machine."""
    one, times = torch.ones(size, size), []
    for _ in range(3):
        started = time.perf_counter()
        one @ one
        times.append(time.perf_counter() - started)
    return size**3 / max(min(times), 1e-9)


def available_bytes() -> int | None:
    """Memory that processes can still take, within the limit of a container; ``None`` where the system does not say."""
    found = []
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found.append(1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable"))))
    with suppress(OSError, ValueError):
        limit, used = (int((CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        lines = (CGROUP / "memory.stat").read_text().splitlines()
        cached = next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
        found.append(max(0, limit - used + cached))
    return min(found, default=None)


def say_forecast(
    simulation: Simulation, methods: Sequence[LayerwiseMethod] = (), calls: Sequence[Call] = (), *,
    options: LayerwiseOptions = DEFAULT, progress: bool = True,
) -> None:
    """Says what a run on a large model will take, before it begins, where bars are shown."""
    if progress and is_large(simulation.model):
        example = max((call.numel for call in getattr(simulation.model, "examples", ())), default=0)
        scale = max((call.numel for call in calls), default=example) / max(example, 1)
        said = advice(simulation, methods, batches=len(calls), scale=scale, options=options)
        tqdm.write(said, file=sys.stderr)


def advice(
    simulation: Simulation, methods: Sequence[LayerwiseMethod], *, batches: int, scale: float, options: LayerwiseOptions
) -> str:
    """The forecast of a run in one line, and what fits this machine if the run does not."""
    own, rate = forecast(simulation, methods, batches=batches, scale=scale, options=options), multiplication_rate()
    free = available_bytes()
    if free is None or own.peak_bytes <= free:
        return own.text(rate)
    disk = forecast(simulation, methods, batches=batches, scale=scale, options=replace(options, offload="disk"))
    way_out = (f'options=LayerwiseOptions(offload="disk") takes {disk.peak_bytes / 1e9:.1f} GB'
               if disk.peak_bytes <= free else "take fewer or shorter batches")
    return f"{own.text(rate)}; {free / 1e9:.1f} GB are free: {way_out}"


def forecast_lines(
    simulation: Simulation, name: str, methods: Sequence[LayerwiseMethod], batches: int
) -> Iterator[str]:
    """Returns what a run called ``name`` takes, for each ``offload`` of a layer-wise one, and which of them fit."""
    rate, free = multiplication_rate(), available_bytes()
    offloads: tuple[Offload, ...] = ("none", "disk") if methods else ("none",)
    for offload in offloads:
        own = forecast(simulation, methods, batches=batches, options=replace(DEFAULT, offload=offload))
        verdict = "fits" if free is None or own.peak_bytes <= free else "does not fit"
        fits = "" if free is None else f", {verdict} in {free / 1e9:.1f} GB"
        yield f"{name}{f', {batches} batches, offload={offload!r}' if methods else ''}: {own.text(rate)}{fits}"
