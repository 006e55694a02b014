"""Sums statistics of layer inputs, holds out samples, and spreads work over the processes of ``torch.distributed``."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import prod
from typing import TypeVar

import torch
from torch import Tensor, distributed

from qtk.errors import CalibrationError
from qtk.moments.holdout import Holdout, holdout_of
from qtk.moments.required_statistics import RequiredStatistics
from qtk.moments.second_moments import SecondMoments
from qtk.numerics.im2col import Geometry
from qtk.observers.ranks import exchanged, several_ranks
from qtk.observers.row_sample import RowSample

T = TypeVar("T")

GRAM_MATRICES = ("gram", "cross", "linear", "difference")
"""Sums that only the solver of a layer reads, nearly all of the bytes."""

AHEAD = 4
"""Layers for each rank whose statistics wait to be solved."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """The layout of one rank's sums, so that a rank without data can add zeros of the same shapes."""

    geometry: Geometry
    required: RequiredStatistics
    rows: int
    shapes: Mapping[str, tuple[int, ...]]


def sum_over_ranks(
    moments: SecondMoments | None, device: torch.device, problem: Exception | None = None, *, owner: int | None = None
) -> SecondMoments | None:
    """The statistics of the data of all ranks; ``None`` if no rank has any.

    Every rank must call it. The sums are reduced by ``all_reduce``, so that no rank holds another's; sample rows are
    gathered. Gram matrices of a layer that has an owner are reduced to it, and the other ranks keep none.

    Args:
        moments: the statistics of this rank.
        device: device of the result.
        problem: an exception of this rank, to be raised on all.
        owner: the rank that gets the Gram matrices; ``None``: all do.

    Raises: ``problem``; CalibrationError for problems of other ranks, and if the ranks collect different statistics.
    """
    if not several_ranks():
        if problem is not None:
            raise problem
        return moments
    local = moments if moments is not None and moments.rows else None
    layouts = [layout for layout in exchanged(None if local is None else _layout(local), problem) if layout is not None]
    if not layouts:
        return None
    first, shapes = layouts[0], _shapes(layouts)
    owned = {name: shape for name, shape in shapes.items() if owner is not None and name in GRAM_MATRICES}
    sums = _reduced(local, {name: shape for name, shape in shapes.items() if name not in owned}, device)
    sums |= _reduced(local, owned, device, owner) if owned else {}
    summed_moments = SecondMoments.of_sums(
        first.geometry, first.required, sum(layout.rows for layout in layouts), sums,
        _sample(local, first.required, device))
    if first.required.holdout is not None:
        summed_moments.held_out = sum_over_ranks(None if moments is None else moments.held_out, device, owner=owner)
    return summed_moments


def _reduced(
    local: SecondMoments | None, shapes: Mapping[str, tuple[int, ...]], device: torch.device, owner: int | None = None
) -> dict[str, Tensor]:
    """The sums over all ranks, on all or on ``owner`` alone: other ranks get none."""
    lengths = [prod(shape) for shape in shapes.values()]
    summed = torch.zeros(sum(lengths), dtype=torch.float64, device=_reduce_device(device))
    sums = {name: part.view(shapes[name]) for name, part in zip(shapes, torch.split(summed, lengths), strict=True)}
    for name, total in () if local is None else local.sums.items():
        if name in sums:
            sums[name].copy_(total)
    if owner is None:
        distributed.all_reduce(summed)
    else:
        distributed.reduce(summed, owner)
    is_here = owner in (None, distributed.get_rank())
    return {name: total.to(device) for name, total in sums.items()} if is_here else {}


def owners_of(costs: Sequence[float]) -> list[int | None]:
    """The rank that does each task, the dearest first where the least is to be done; ``None`` in one process.

    >>> owners_of([1.0, 2.0])
    [None, None]
    """
    if not several_ranks():
        return [None] * len(costs)
    loads, owners = [0.0] * distributed.get_world_size(), dict[int, int]()
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += costs[index]
    return [owners[index] for index in range(len(costs))]


def spread(tasks: Sequence[Callable[[], T]], owners: Sequence[int | None]) -> list[T]:
    """Runs each task on the rank that owns it. Returns: all results, on all ranks.

    >>> spread([lambda: "one", lambda: "two"], [None, None])
    ['one', 'two']

    Raises: the exception of a task; on other ranks CalibrationError with its message.
    """
    if not several_ranks():
        return [task() for task in tasks]
    results, problem = dict[int, T](), None
    try:
        results = {index: tasks[index]() for index, owner in enumerate(owners) if owner == distributed.get_rank()}
    except Exception as error:  # the other ranks are waiting
        problem = error
    shares = exchanged(results, problem)
    return [shares[owner][index] for index, owner in enumerate(owners) if owner is not None]


def layers_at_once() -> int:
    """Layers that ranks solve together, if none waits for another: a few for each rank, so that all end together."""
    return AHEAD * distributed.get_world_size() if several_ranks() else 1


def holdout_of_ranks(fraction: float, groups: Sequence[Hashable] | None, num_batches: int) -> Holdout | None:
    """The samples to hold out of this rank's batches: the same groups on all. Raises: on all, as ``holdout_of``."""
    if not several_ranks():
        return holdout_of(fraction, groups, num_batches)
    shares = exchanged((groups, num_batches), None)
    turns = zip_longest(*(own or () for own, _ in shares), fillvalue=shares)  # the batches of the ranks in turns
    labels = [label for turn in turns for label in turn if label is not shares]
    return [holdout_of(fraction, own, count, labels) for own, count in shares][distributed.get_rank()]


def _layout(moments: SecondMoments) -> _Layout:
    shapes = {name: tuple(total.shape) for name, total in moments.sums.items()}
    return _Layout(moments.geometry, moments.required, moments.rows, shapes)


def _shapes(layouts: Sequence[_Layout]) -> dict[str, tuple[int, ...]]:
    """The shape of every sum that any rank has, in one order. Raises: CalibrationError if the ranks do not agree."""
    shapes: dict[str, tuple[int, ...]] = {}
    agree = len({(layout.geometry, replace(layout.required, holdout=None)) for layout in layouts}) == 1
    for layout in layouts:
        agree = agree and all(shapes.get(name, shape) == shape for name, shape in layout.shapes.items())
        shapes.update(layout.shapes)
    if not agree or {"linear", "cross"} <= shapes.keys():
        raise CalibrationError("ranks collect different statistics of a layer; quantize the same model with the same "
                               "settings on every rank")
    return dict(sorted(shapes.items()))


def _reduce_device(device: torch.device) -> torch.device:
    """NCCL reduces on the GPU; every other backend on the CPU."""
    return device if distributed.get_backend() == "nccl" else torch.device("cpu")


def _sample(local: SecondMoments | None, required: RequiredStatistics, device: torch.device) -> RowSample:
    """The rows kept by all ranks, in the order of the ranks."""
    if not required.sample_rows:
        return RowSample(0)
    sample = None if local is None else local.row_sample.moved(torch.device("cpu"))
    joined, *others = [each for each in exchanged(sample, None) if each is not None]
    for other in others:
        joined.merge(other)
    return joined.moved(device)
