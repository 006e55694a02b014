"""Searches for the best of many candidate encodings: all sites at once, in memory that does not grow with them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from qtk.calibrators.min_max import encoding_of_range
from qtk.core.dtypes import FloatDtype
from qtk.core.encoding import Encoding
from qtk.core.granularity import Granularity, PerTensor
from qtk.core.spec import QuantSpec
from qtk.numerics.ranges import choose_range
from qtk.observers.histogram import Histogram
from qtk.observers.observer import Observer
from qtk.observers.raw_values import RawValues
from qtk.observers.weighted_samples import WeightedSamples
from qtk.ops.candidate_errors import candidate_errors

AT_ONCE = 1 << 20
"""Samples looked at together: 8 MiB of them in float64, and as much for how often they were seen."""

FINALISTS = 8
ROUGHLY = 1e-3
"""Relative error that sums in float32 stay below, by far, where a step is many of its last digits."""
DIGIT = 2.0**-21
"""A few last digits of float32, relative: what one x - x̂ may be off."""
FEW_CODES = 1 << 10

Sampled: TypeAlias = Histogram | RawValues
"""Observers that know how the values of a scale are distributed."""

Propose: TypeAlias = Callable[[Tensor, Tensor, QuantSpec], tuple[Tensor, Tensor | None]]
"""Lowest and highest value of each scale, float64 [scales] → scales float32 and zero points int32 or ``None``,
[candidates, scales]."""

Choose: TypeAlias = Callable[[WeightedSamples, QuantSpec], tuple[Tensor, Tensor | None]]
"""What was seen → scale float32 [scales] and zero point int32 or ``None``, alike."""


def sampler(granularity: Granularity, *, static: bool, bins: int, growth: float | None = None) -> Sampled:
    """Everything of what is static and seen once, a histogram of what streams.

    Raises: CalibrationError if bins or growth are none.
    """
    streaming = Histogram(granularity, bins=bins, growth=growth)
    return RawValues(granularity) if static else streaming


def sampled(observers: Sequence[Observer]) -> list[Sampled]:
    """The observers, which are of ``sampler``."""
    known = [observer for observer in observers if isinstance(observer, Histogram | RawValues)]
    assert len(known) == len(observers)
    return known


def least_error(
    observers: Sequence[Observer], specs: Sequence[QuantSpec], propose: Propose, *, norm: float, clipped: float = 1.0
) -> list[Encoding]:
    """For each scale the candidate of least ``Σ |x - x̂|^norm``, what is clipped counted ``clipped`` times.

    The first of equal ones wins. Small floats hold the whole range: their steps follow the values.

    Raises: CalibrationError if a scale saw nothing.
    """

    def choose(points: WeightedSamples, spec: QuantSpec) -> tuple[Tensor, Tensor | None]:
        if isinstance(spec.dtype, FloatDtype):
            return choose_range(points.low, points.high, spec)
        scales, zero_points = propose(points.low, points.high, spec)
        best = _Errors(points, spec, norm, clipped).least(scales, zero_points)
        return scales.gather(0, best)[0], None if zero_points is None else zero_points.gather(0, best)[0]

    return choose_all(observers, specs, choose)


def choose_all(observers: Sequence[Observer], specs: Sequence[QuantSpec], choose: Choose) -> list[Encoding]:
    """What ``choose`` decides for every site; it is shown the scales of many sites together.

    A scale that saw nothing but zeros takes scale 1. Scales that are stored in few bits hold the whole range, for only
    all of a tensor's scales together say which can be stored.

    Raises: CalibrationError if a scale saw nothing.
    """
    found: dict[int, Encoding] = {}
    waiting: dict[object, list[_Site]] = defaultdict(list)

    def decide(sites: list[_Site]) -> None:
        if sites:
            found.update(_decide(sites, choose))
            sites.clear()

    for number, (observer, spec) in enumerate(zip(sampled(observers), specs, strict=True)):
        site = _Site(number, spec, observer.shape, observer.points())
        if spec.scale_format is not None:
            found[number] = site.whole()
            continue
        alike = waiting[replace(spec, granularity=PerTensor()), site.points.kind]
        if (len(alike) + 1) * site.points.values.numel() > AT_ONCE:
            decide(alike)
        alike.append(site)
    for alike in waiting.values():
        decide(alike)
    return [found[number] for number in range(len(specs))]


@dataclass(frozen=True, slots=True)
class _Errors:
    """Sums over points, for one spec and measure."""

    points: WeightedSamples
    spec: QuantSpec
    norm: float
    clipped: float

    def least(self, scales: Tensor, zero_points: Tensor | None) -> Tensor:
        """The first candidate of least error in float64. Shape: [1, scales].

        Where there is much to sum, float32 says first which candidates can be it. Whether the outermost value is
        clipped may hang on its last digit: where that is dearer, float64 decides alone.
        """
        many_codes = self.spec.qmax - self.spec.qmin >= FEW_CODES
        if self.points.counts is not None or self.clipped != 1 or many_codes or len(scales) <= 2 * FINALISTS:
            return self.sums(scales, zero_points, torch.float64).argmin(0, keepdim=True)
        rough = self.sums(scales, zero_points, torch.float32)
        digit = torch.maximum(self.points.high, -self.points.low) * DIGIT
        lost = self.points.values.shape[1] * digit**self.norm
        near = rough <= rough.amin(0) * (1 + ROUGHLY) + lost
        rank = torch.arange(len(scales), 0, -1, device=rough.device)[:, None]  # the first is the highest
        finalists = torch.where(near, rank, 0).topk(FINALISTS, 0).indices.sort(0).values
        zeros = None if zero_points is None else zero_points.gather(0, finalists)
        sums = self.sums(scales.gather(0, finalists), zeros, torch.float64)
        best = finalists.gather(0, sums.argmin(0, keepdim=True))
        close = near.sum(0) > FINALISTS
        if bool(close.any()):
            own = replace(self, points=self.points.of(close))
            zeros = None if zero_points is None else zero_points[:, close]
            best[:, close] = own.sums(scales[:, close], zeros, torch.float64).argmin(0, keepdim=True)
        return best

    def sums(self, scales: Tensor, zero_points: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Shape: [candidates, scales]."""
        points, spec = self.points, self.spec
        errors = torch.zeros(scales.shape, dtype=torch.float64, device=scales.device)
        for begin in range(0, points.values.shape[1], AT_ONCE):
            here = slice(begin, begin + AT_ONCE)
            errors += candidate_errors(
                points.values[:, here].to(dtype), scales.to(dtype), zero_points, (1, -1), int(spec.qmin),
                int(spec.qmax), norm=self.norm,
                importance=None if points.counts is None else points.counts[:, here], clipped=self.clipped,
            )
        return errors


@dataclass(frozen=True, slots=True)
class _Site:
    number: int
    spec: QuantSpec
    shape: tuple[int, ...]
    points: WeightedSamples

    def whole(self) -> Encoding:
        """The encoding that holds everything. Raises: CalibrationError if a scale saw nothing."""
        return encoding_of_range(self.points.low.reshape(self.shape), self.points.high.reshape(self.shape), self.spec)


def _decide(sites: Sequence[_Site], choose: Choose) -> Iterator[tuple[int, Encoding]]:
    """The encodings of sites with one spec, granularity apart, and points of one kind."""
    wholes = [site.whole() for site in sites]
    parts = [choose(part, sites[0].spec) for part in _in_parts(_join([site.points for site in sites]))]
    scale = torch.cat([part[0] for part in parts])
    zero_point = torch.cat([torch.zeros_like(part[0]) if part[1] is None else part[1] for part in parts])
    begin = 0
    for site, whole in zip(sites, wholes, strict=True):
        own = slice(begin, begin + site.points.scales)
        begin = own.stop
        zeros = ((site.points.low == 0) & (site.points.high == 0)).reshape(site.shape)
        chosen = torch.where(zeros, whole.scale, scale[own].reshape(site.shape))
        start = whole.zero_point
        if start is not None:
            start = torch.where(zeros, start, zero_point[own].reshape(site.shape))
        yield site.number, Encoding(site.spec, chosen, start)


def _join(points: Sequence[WeightedSamples]) -> WeightedSamples:
    if len(points) == 1:
        return points[0]
    counts = [own.counts for own in points if own.counts is not None]
    return WeightedSamples(
        torch.cat([own.values for own in points]),
        torch.cat(counts) if counts else None,
        torch.cat([own.low for own in points]),
        torch.cat([own.high for own in points]),
        torch.cat([own.reach for own in points]),
    )


def _in_parts(points: WeightedSamples) -> Iterator[WeightedSamples]:
    step = max(1, AT_ONCE // max(points.values.shape[1], 1))
    for begin in range(0, points.scales, step):
        yield points.of(slice(begin, begin + step))
