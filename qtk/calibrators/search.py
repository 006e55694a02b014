"""Searches for the best of many candidate encodings: all sites at once, in memory that does not grow with them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from qtk.calibrators.min_max import encoding_of_range
from qtk.core.dtypes import FloatDtype
from qtk.core.encoding import Encoding
from qtk.core.granularity import Granularity, PerTensor
from qtk.core.spec import QuantSpec
from qtk.observers.histogram import Histogram
from qtk.observers.observer import Observer
from qtk.observers.points import Points
from qtk.observers.whole import Whole
from qtk.ops.candidate_errors import candidate_errors

AT_ONCE = 1 << 20
"""Points looked at together: 8 MiB of them, and as much for how often they were seen."""

Sampled: TypeAlias = Histogram | Whole
"""Observers that know how the values of a scale are distributed."""

Propose: TypeAlias = Callable[[Tensor, Tensor, QuantSpec], tuple[Tensor, Tensor | None]]
"""Lowest and highest value of each scale, float64 [scales] → scales float32 and zero points int32 or ``None``,
[candidates, scales]."""

Choose: TypeAlias = Callable[[Points, QuantSpec], tuple[Tensor, Tensor | None]]
"""What was seen → scale float32 [scales] and zero point int32 or ``None``, alike."""


def sampler(granularity: Granularity, *, static: bool, bins: int, growth: float | None = None) -> Sampled:
    """Everything of what is static and seen once, a histogram of what streams.

    Raises: CalibrationError if bins or growth are none.
    """
    streaming = Histogram(granularity, bins=bins, growth=growth)
    return Whole(granularity) if static else streaming


def sampled(observers: Sequence[Observer]) -> list[Sampled]:
    """The observers, which are of ``sampler``."""
    known = [observer for observer in observers if isinstance(observer, Histogram | Whole)]
    assert len(known) == len(observers)
    return known


def least_error(
    observers: Sequence[Observer], specs: Sequence[QuantSpec], propose: Propose, *, norm: float, clipped: float = 1.0
) -> list[Encoding]:
    """For each scale the candidate of least ``Σ |x - x̂|^norm``, what is clipped counted ``clipped`` times.

    The first of equal ones wins.

    Raises: CalibrationError if a scale saw nothing.
    """

    def choose(points: Points, spec: QuantSpec) -> tuple[Tensor, Tensor | None]:
        scales, zero_points = propose(points.low, points.high, spec)
        errors = candidate_errors(
            points.values, scales.to(torch.float64), zero_points, (1, -1), int(spec.qmin), int(spec.qmax), norm=norm,
            importance=points.counts, clipped=clipped,
        )
        best = errors.argmin(0, keepdim=True)
        return scales.gather(0, best)[0], None if zero_points is None else zero_points.gather(0, best)[0]

    return choose_all(observers, specs, choose)


def choose_all(observers: Sequence[Observer], specs: Sequence[QuantSpec], choose: Choose) -> list[Encoding]:
    """What ``choose`` decides for every site; it is shown the scales of many sites together.

    A scale that saw nothing but zeros, floating formats and scales that are stored in few bits take the whole range:
    a step of theirs does not depend on it, or must be one that can be stored.

    Raises: CalibrationError if a scale saw nothing.
    """
    result: list[Encoding | None] = [None] * len(observers)
    alike: dict[object, list[tuple[int, Points]]] = defaultdict(list)
    known = sampled(observers)
    for number, (observer, spec) in enumerate(zip(known, specs, strict=True)):
        points = observer.points()
        whole = encoding_of_range(points.low.reshape(observer.shape), points.high.reshape(observer.shape), spec)
        if isinstance(spec.dtype, FloatDtype) or spec.scale_format is not None:
            result[number] = whole
            continue
        kind = (
            replace(spec, granularity=PerTensor()), points.values.shape[1], points.counts is None, points.values.device
        )
        alike[kind].append((number, points))
    for members in alike.values():
        numbers = [number for number, _ in members]
        joined = _join([points for _, points in members])
        spec = specs[numbers[0]]
        parts = [choose(part, spec) for part in _in_parts(joined)]
        scale = torch.cat([part[0] for part in parts])
        zero_point = None if spec.symmetric else torch.cat([part[1] for part in parts if part[1] is not None])
        begin = 0
        for number, points in members:
            own = slice(begin, begin + points.scales)
            begin += points.scales
            result[number] = _encoding(
                specs[number], known[number].shape, points, scale[own],
                None if zero_point is None else zero_point[own],
            )
    assert all(encoding is not None for encoding in result)
    return [encoding for encoding in result if encoding is not None]


def _encoding(
    spec: QuantSpec, shape: tuple[int, ...], points: Points, scale: Tensor, zero_point: Tensor | None
) -> Encoding:
    whole = encoding_of_range(points.low, points.high, spec)
    only_zeros = (points.low == 0) & (points.high == 0)
    scale = torch.where(only_zeros, whole.scale, scale)
    if zero_point is not None:
        assert whole.zero_point is not None
        zero_point = torch.where(only_zeros, whole.zero_point, zero_point).reshape(shape)
    return Encoding(spec, scale.reshape(shape), zero_point)


def _join(points: Sequence[Points]) -> Points:
    if len(points) == 1:
        return points[0]
    counts = [own.counts for own in points if own.counts is not None]
    return Points(
        torch.cat([own.values for own in points]),
        torch.cat(counts) if counts else None,
        torch.cat([own.low for own in points]),
        torch.cat([own.high for own in points]),
        torch.cat([own.reach for own in points]),
    )


def _in_parts(points: Points) -> Iterator[Points]:
    step = max(1, AT_ONCE // max(points.values.shape[1], 1))
    for begin in range(0, points.scales, step):
        yield points.of(slice(begin, begin + step))
