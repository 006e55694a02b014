"""Searches candidate encodings for the least error, for many sites together and in bounded memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from qtk.calibrators.min_max import encoding_of_range, encodings_of
from qtk.core.dtypes import FloatDtype
from qtk.core.encoding import HOST, Encoding, encodings_to, moved
from qtk.core.granularity import Granularity
from qtk.core.spec import PER_TENSOR, QuantSpec
from qtk.numerics.ranges import covering_range
from qtk.observers.histogram import Histogram
from qtk.observers.observer import Observer
from qtk.observers.raw_values import RawValues
from qtk.observers.weighted_samples import WeightedSamples
from qtk.ops.least_candidate import least_candidate

AT_ONCE = 1 << 20
"""Samples searched together."""

Sampled: TypeAlias = Histogram | RawValues
"""Observers that keep the distribution of the values of a scale."""

Propose: TypeAlias = Callable[[Tensor, Tensor, QuantSpec], tuple[Tensor, Tensor | None]]
"""Lowest and highest value of each scale, float64 [scales] → scales float32 and zero points int32 or ``None``,
[candidates, scales]."""

Choose: TypeAlias = Callable[[WeightedSamples, QuantSpec], tuple[Tensor, Tensor | None]]
"""Samples → scale float32 [scales], and zero point int32 [scales] or ``None``.

The specs of one call differ in granularity alone, every scale has samples, and nothing may wait for a GPU."""


def sampler(granularity: Granularity, *, static: bool, bins: int, growth: float | None = None) -> Sampled:
    """A new observer: ``RawValues`` for a static tensor, which is observed once, else ``Histogram``.

    Raises: CalibrationError if ``bins`` or ``growth`` is out of range.
    """
    streaming = Histogram(granularity, bins=bins, growth=growth)
    return RawValues(granularity) if static else streaming


def sampled(observers: Sequence[Observer]) -> list[Sampled]:
    """``observers``, all created by ``sampler``, with their type."""
    known = [observer for observer in observers if isinstance(observer, Histogram | RawValues)]
    assert len(known) == len(observers)
    return known


def least_error(
    observers: Sequence[Observer], specs: Sequence[QuantSpec], propose: Propose, *, norm: float, clipped: float = 1.0
) -> list[Encoding]:
    """For each scale the candidate of least ``Σ |x - x̂|^norm``, errors of clipped values weighted by ``clipped``.

    The first of equal candidates wins. Floating-point formats take the full range: their steps follow the values.

    Raises: CalibrationError if a scale saw nothing.
    """

    def choose(samples: WeightedSamples, spec: QuantSpec) -> tuple[Tensor, Tensor | None]:
        if isinstance(spec.dtype, FloatDtype):
            return covering_range(samples.low, samples.high, spec)
        scales, zero_points = propose(samples.low, samples.high, spec)
        best = least_candidate(samples.values, scales, zero_points, int(spec.qmin), int(spec.qmax), norm=norm,
                               counts=samples.counts, clipped=clipped)[None]
        return scales.gather(0, best)[0], None if zero_points is None else zero_points.gather(0, best)[0]

    return choose_all(observers, specs, choose)


def choose_all(observers: Sequence[Observer], specs: Sequence[QuantSpec], choose: Choose) -> list[Encoding]:
    """The encodings that ``choose`` finds; one call gets the scales of many sites.

    A scale that saw only zeros takes scale 1. Scales stored in few bits (``scale_format``) take the full range, because
    which values can be stored depends on all scales of a tensor.

    Raises: CalibrationError if a scale saw nothing.
    """
    encodings: dict[int, Encoding] = {}
    device = HOST
    waiting: dict[object, list[_Site]] = defaultdict(list)

    def decide(sites: list[_Site]) -> None:
        if sites:
            encodings.update(_decide(sites, choose))
            sites.clear()

    for number, (observer, spec) in enumerate(zip(sampled(observers), specs, strict=True)):
        site = _Site(number, spec, observer.shape, observer.samples())
        device = site.samples.low.device
        if spec.scale_format is not None:
            encodings[number] = encoding_of_range(*site.range(*moved((site.samples.low, site.samples.high), HOST)))
            continue
        same_kind = waiting[replace(spec, granularity=PER_TENSOR), site.samples.kind]
        if (len(same_kind) + 1) * site.samples.values.numel() > AT_ONCE:
            decide(same_kind)
        same_kind.append(site)
    for same_kind in waiting.values():
        decide(same_kind)
    return encodings_to([encodings[number] for number in range(len(specs))], device)


@dataclass(frozen=True, slots=True)
class _Site:
    number: int
    spec: QuantSpec
    shape: tuple[int, ...]
    samples: WeightedSamples

    def range(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, QuantSpec]:
        """The range as ``encodings_of`` takes it. Shape: [scales]."""
        return low.reshape(self.shape), high.reshape(self.shape), self.spec


def _decide(sites: Sequence[_Site], choose: Choose) -> Iterator[tuple[int, Encoding]]:
    """The encodings of sites whose specs differ only in granularity and whose samples are of one kind; on the CPU.

    An accelerator is waited for twice, and by ``choose``.
    """
    joined = _join([site.samples for site in sites])
    sizes = [site.samples.scales for site in sites]
    low, high = moved((joined.low, joined.high), HOST)
    split = zip(sites, torch.split(low, sizes), torch.split(high, sizes), strict=True)
    full_ranges = encodings_of([site.range(*ends) for site, *ends in split])
    parts = [choose(part, sites[0].spec) for part in _in_parts(joined)]
    zero_points = [torch.zeros_like(part[0]) if part[1] is None else part[1] for part in parts]
    scale, zero_point = moved((torch.cat([part[0] for part in parts]), torch.cat(zero_points)), HOST)
    only_zeros = (low == 0) & (high == 0)
    scale = torch.where(only_zeros, torch.cat([full.scale.reshape(-1) for full in full_ranges]), scale)
    full_zeros = [full.zero_point.reshape(-1) for full in full_ranges if full.zero_point is not None]
    encoding = Encoding(replace(sites[0].spec, granularity=PER_TENSOR), scale,
                        torch.where(only_zeros, torch.cat(full_zeros), zero_point) if full_zeros else None)
    yield from zip((site.number for site in sites), encoding.split([(site.spec, site.shape) for site in sites]),
                   strict=True)


def _join(samples: Sequence[WeightedSamples]) -> WeightedSamples:
    if len(samples) == 1:
        return samples[0]
    counts = [each.counts for each in samples if each.counts is not None]
    return WeightedSamples(
        torch.cat([each.values for each in samples]),
        torch.cat(counts) if counts else None,
        torch.cat([each.low for each in samples]),
        torch.cat([each.high for each in samples]),
        torch.cat([each.reach for each in samples]),
        samples[0].binned,
    )


def _in_parts(samples: WeightedSamples) -> Iterator[WeightedSamples]:
    scales_at_once = max(1, AT_ONCE // max(samples.values.shape[1], 1))
    for begin in range(0, samples.scales, scales_at_once):
        yield samples.of(slice(begin, begin + scales_at_once))
