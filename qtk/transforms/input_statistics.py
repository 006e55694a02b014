"""Per-channel ranges of the values that weights are multiplied with, and samples of them from other data."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, fx, nn

from qtk.data.valid_tokens import ValidTokens
from qtk.errors import CalibrationError
from qtk.graph.captured_graph import CapturedGraph
from qtk.graph.graphs import entered
from qtk.graph.sites import value_site
from qtk.nn.tap import Tap
from qtk.observers.extremes import ADVICE
from qtk.observers.row_sample import RowSample

NUM_ROWS = 512
"""Rows kept of a value that enters a matrix product."""

NUM_MAPS, MAP_ELEMENTS = 8, 2**21
"""Feature maps kept of the input of a convolution: at most so many, and so many elements, but at least one."""

SITE_ELEMENTS = 2**18
"""Elements kept of a value that no weight is multiplied with; at least one feature map."""

HELD_OUT_EVERY = 4
"""Every so-many-th batch is held out, the second first; of a single batch, the last so-many-th part."""

TAP = "qtk_statistics_tap"

Counted: TypeAlias = Callable[[Tensor], Tensor | None]
"""From a value to which of its elements count; ``None``: all."""


class Sampling(enum.Enum):
    """What may be taken out of a value without changing what the layer computes of the rest."""

    ROWS = "every vector along the last axis"
    MAPS = "every element of axis 0"
    WHOLE = "nothing"

    @property
    def strictness(self) -> int:
        """Position among the kinds, from what lets most be left out."""
        return list(Sampling).index(self)


@dataclass(frozen=True, slots=True, eq=False)
class TappedValue:
    """A value to gather statistics of.

    Args:
        graph: the graph it belongs to.
        node: the node that makes it.
        axis: its channels.
        sampling: how it is sampled.
        keeps_rows: whether vectors of all channels are sampled from the data for statistics too.
        is_input: whether weights are multiplied with it; else only samples are kept.
    """

    graph: CapturedGraph
    node: fx.Node
    axis: int
    sampling: Sampling
    keeps_rows: bool = False
    is_input: bool = True


class InputStatistics:
    """Range of every channel of one value over the data for statistics, and samples of the held-out data.

    Whether there is more than one batch is known only at the end: the first batch is taken in two parts, of which the
    second is held-out data if no other batch comes, else part of the statistics.

    ``elements``: of the largest value seen.

    Args:
        value: the value.
    """

    def __init__(self, value: TappedValue) -> None:
        self._value = value
        self._ranges = _Ranges(value)
        elements = MAP_ELEMENTS if value.is_input else SITE_ELEMENTS
        self._held_out = _Samples(value.sampling, elements)
        self._first_rest = _Ranges(value)
        self._first_held_out = _Samples(value.sampling, elements)
        self.elements = 0

    def observe(self, x: Tensor, batch: int, counted: Tensor | None = None) -> None:
        """Adds a value of batch number ``batch``.

        Shape: ``counted``, bool, as ``x``: the elements that count; ``None``: all. Maps have 0 in place of the others.

        Raises: CalibrationError if an element that counts is NaN or infinite.
        """
        self.elements = max(self.elements, x.numel())
        if x.numel() == 0 or (counted is not None and not bool(counted.any())):
            return
        if batch == 0:
            splits = self._value.sampling is not Sampling.WHOLE and self._value.axis % x.ndim != 0 and len(x) > 1
            used = len(x) - max(1, len(x) // HELD_OUT_EVERY) if splits else len(x)
            if splits and counted is not None and not (bool(counted[:used].any()) and bool(counted[used:].any())):
                splits, used = False, len(x)  # one of the parts is padding alone
            first, rest = (None, None) if counted is None else (counted[:used], counted[used:])
            self._ranges.add(x[:used], first)
            self._first_rest.add(x[used:], rest)
            self._first_held_out.add(x[used:] if splits else x, rest if splits else counted)
        elif batch % HELD_OUT_EVERY == 1:
            _Ranges(self._value).add(x, counted)  # checks
            self._held_out.add(x, counted)
        else:
            self._ranges.add(x, counted)

    @property
    def is_complete(self) -> bool:
        """Says whether there are ranges and samples."""
        return self._ranges.low is not None and bool(self.samples)

    @property
    def samples(self) -> list[Tensor]:
        """Samples of held-out data."""
        return self._held_out.tensors or self._first_held_out.tensors

    @property
    def range(self) -> tuple[Tensor, Tensor]:
        """Smallest and largest value of every channel in the data for statistics. Shape: [C] each."""
        low, high, rest = self._ranges.low, self._ranges.high, self._first_rest
        assert low is not None
        assert high is not None
        if rest.low is not None and rest.high is not None and self._held_out.tensors:
            return torch.minimum(low, rest.low), torch.maximum(high, rest.high)
        return low, high

    @property
    def rows(self) -> list[Tensor]:
        """Vectors of all channels from the data for statistics. Shape: [rows, C] each."""
        rest = self._first_rest.rows.tensors if self._held_out.tensors else []
        return self._ranges.rows.tensors + rest

    @property
    def is_held_out(self) -> bool:
        """Says whether the samples are of data that the range has not seen."""
        return bool(self._held_out.tensors) or self._first_rest.low is not None


class _Ranges:
    def __init__(self, value: TappedValue) -> None:
        self._value = value
        self.low: Tensor | None = None
        self.high: Tensor | None = None
        self.rows = _Samples(Sampling.ROWS)

    def add(self, x: Tensor, counted: Tensor | None = None) -> None:
        if x.numel() == 0 or not self._value.is_input or (counted is not None and not bool(counted.any())):
            return
        others = [axis for axis in range(x.ndim) if axis != self._value.axis % x.ndim]
        least, most = (x, x) if counted is None else (x.where(counted, torch.inf), x.where(counted, -torch.inf))
        low, high = (least.amin(others), most.amax(others)) if others else (least, most)
        low, high = low.to(torch.float32), high.to(torch.float32)
        if not bool((low.isfinite() & high.isfinite()).all()):
            raise CalibrationError(f"{value_site(self._value.node)}: NaN or infinity in the data; {ADVICE}")
        self.low = low if self.low is None else torch.minimum(self.low, low)
        self.high = high if self.high is None else torch.maximum(self.high, high)
        if self._value.keeps_rows:
            self.rows.add(x.movedim(self._value.axis, -1),
                          None if counted is None else counted.movedim(self._value.axis, -1))


class _Samples:
    """An evenly spaced sample of what it is shown; maps of another shape than the first are left out."""

    def __init__(self, sampling: Sampling, elements: int = MAP_ELEMENTS) -> None:
        self._sampling = sampling
        self._elements = elements
        self._rows: RowSample | None = None
        self._shape: torch.Size | None = None

    @property
    def tensors(self) -> list[Tensor]:
        if self._rows is None or self._shape is None:
            return []
        samples = self._rows.rows[0].reshape(-1, *self._shape)
        return list(samples) if self._sampling is Sampling.WHOLE else [samples]

    def add(self, x: Tensor, counted: Tensor | None = None) -> None:
        if counted is not None:
            x = x.where(counted, 0)
        if x.numel() == 0:
            return
        if self._sampling is Sampling.ROWS:
            x = x.reshape(-1, x.shape[-1])
            x = x if counted is None else x[counted.reshape(x.shape).any(1)]
            if not len(x):
                return
        elif self._sampling is Sampling.WHOLE:
            x = x[None]
        if self._rows is None:
            self._shape, per_sample = x.shape[1:], x[0].numel()
            limit = NUM_ROWS if self._sampling is Sampling.ROWS else min(NUM_MAPS, max(1, self._elements // per_sample))
            self._rows = RowSample(limit)
        if x.shape[1:] == self._shape:
            self._rows.add(x.reshape(1, len(x), -1))


class _StatisticsTap(Tap):
    def __init__(self, statistics: InputStatistics, batches: _BatchCounter, counted: Counted) -> None:
        super().__init__()
        self._statistics = statistics
        self._batches = batches
        self._counted = counted

    @property
    def idle(self) -> bool:
        return False

    def forward(self, x: Tensor) -> Tensor:
        """Shape: any; result ``x``."""
        self._statistics.observe(x.detach(), max(self._batches.number, 0), self._counted(x.detach()))
        return x


class _BatchCounter:
    """Number of the present call of the model, from 0."""

    def __init__(self) -> None:
        self.number = -1

    def __call__(self, module: nn.Module, args: object) -> None:
        self.number += 1


@contextmanager
def gathering(
    model: nn.Module, values: Sequence[TappedValue], tokens: ValidTokens | None = None
) -> Iterator[list[InputStatistics]]:
    """Gathers statistics of ``values`` while the body runs the model; each call of the model is a batch.

    ``tokens``: which tokens count, where they can be followed; ``None``: all.

    Yields: the statistics, in the order of ``values``.
    """
    batches, tokens = _BatchCounter(), tokens or ValidTokens(model, None)
    statistics = [InputStatistics(value) for value in values]
    calls: list[fx.Node] = []
    handles = [module.register_forward_pre_hook(batches) for module in entered(model)]
    try:
        for index, (value, each) in enumerate(zip(values, statistics, strict=True)):
            value.graph.add_module(f"{TAP}_{index}", _StatisticsTap(
                each, batches, partial(tokens.counted_at, value.node)))
            after = value.node
            while after.next.op == "placeholder":
                after = after.next
            with value.graph.graph.inserting_after(after):
                calls.append(value.graph.graph.call_module(f"{TAP}_{index}", (value.node,)))
        for graph in {id(value.graph): value.graph for value in values}.values():
            graph.recompile()
        yield statistics
    finally:
        for handle in handles:
            handle.remove()
        for value, call in zip(values, calls, strict=False):
            value.graph.graph.erase_node(call)
        for index, value in enumerate(values):
            value.graph._modules.pop(f"{TAP}_{index}", None)
        for graph in {id(value.graph): value.graph for value in values}.values():
            graph.recompile()
