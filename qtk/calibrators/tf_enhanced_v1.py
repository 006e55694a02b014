"""The variant ``v1`` of tf_enhanced: reproduces ``TfEnhancedEncodingAnalyzer`` of AIMET's C++ library.

It reproduces the histogram (``FirstBatchHistogram``), the candidates, their cost and the rounding, half away from zero,
as published in ``TfEnhancedEncodingAnalyzer.cpp`` and ``math_functions.cpp``. It differs where AIMET computes the
fractions of symmetric scales in float32 (here float64), and does not reproduce AIMET's strict-symmetric and
unsigned-symmetric modes.

N = qmax - qmin; the observed range goes from the left end of the first occupied bin to the left end of the last, holds
0 and is at least 0.01 wide; [-1, 1] if only zeros were seen.

    symmetric     scales k/100 of the largest magnitude over N/2, k = 1…101
    asymmetric    scales k/16 of the observed one, k = 1…17, with the range starting at ``int(-N + i·N/20)`` scales,
                  i = 0…20: skipped if wider than the observed range on both sides, else clamped to it; and the
                  observed range itself
    cost          ``Σ share · (x - x̂)²`` over the middles of the bins inside the candidate's range, and
                  ``gamma · Σ share · (x - end)²`` over the values outside; ``end`` is the middle of the bin in which
                  the range ends
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from qtk.calibrators.min_max import encoding_of_range
from qtk.core.dtypes import FloatDtype
from qtk.core.encoding import Encoding
from qtk.core.spec import QuantSpec
from qtk.errors import CalibrationError
from qtk.numerics.ranges import held_scale
from qtk.observers.first_batch_histogram import BINS, FirstBatchHistogram
from qtk.observers.observer import Observer

SCALES_AT_ONCE = 64
SMALLEST_RANGE = 0.01
MOST_DROPPED = 0.001
"""Share of a scale's values outside its bins that is not worth a warning."""


def encodings(observers: Sequence[Observer], specs: Sequence[QuantSpec], *, gamma: float) -> list[Encoding]:
    """The encodings of least cost. Raises: CalibrationError if a site saw nothing."""
    return [_encoding(observer, spec, gamma) for observer, spec in zip(observers, specs, strict=True)]


def _encoding(observer: Observer, spec: QuantSpec, gamma: float) -> Encoding:
    assert isinstance(observer, FirstBatchHistogram)
    if not observer.count:
        raise CalibrationError("no data was observed; calibrate with data that reaches this site")
    histogram = observer.shares()
    if histogram is None:
        one = torch.ones(observer.shape, device=observer.device)
        return encoding_of_range(-one, one, spec)
    if observer.dropped > MOST_DROPPED:
        warnings.warn(
            f"{observer.dropped:.1%} of the values lie outside three times the range of the first batch, which "
            "tf_enhanced(variant='v1') drops; shuffle the data, or use tf_enhanced", stacklevel=2,
        )
    left, shares, seen = histogram
    occupied = shares > 0
    empty = ~occupied.any(1)  # only zeros, in a tensor that has other numbers elsewhere
    first = occupied.to(torch.int8).argmax(1, keepdim=True)
    last = BINS - 1 - occupied.flip(1).to(torch.int8).argmax(1, keepdim=True)
    low = left.gather(1, first)[:, 0].clamp(max=0.0).masked_fill(empty, -1.0)
    high = left.gather(1, last)[:, 0].clamp(min=0.0)
    high = torch.maximum(high, low + SMALLEST_RANGE).masked_fill(empty, 1.0)
    low, high = (bound.masked_fill(~seen, torch.nan) for bound in (low, high))
    full = encoding_of_range(low.reshape(observer.shape), high.reshape(observer.shape), spec)
    if isinstance(spec.dtype, FloatDtype) or spec.scale_format is not None:
        return full
    scales, starts = [], []
    for begin in range(0, len(left), SCALES_AT_ONCE):
        own = slice(begin, begin + SCALES_AT_ONCE)
        propose = _symmetric if spec.symmetric else _asymmetric
        scale, start = propose(low[own], high[own], spec)
        cost = _cost(left[own], shares[own], scale, start, spec, gamma)
        best = cost.masked_fill(scale <= 0, torch.inf).argmin(0, keepdim=True)
        scales.append(scale.gather(0, best)[0])
        starts.append(start.gather(0, best)[0])
    start = spec.qmin - torch.cat(starts)
    nothing = empty.reshape(observer.shape)
    scale = torch.where(nothing, full.scale, held_scale(torch.cat(scales), start, spec).reshape(observer.shape))
    zero_point = full.zero_point
    if zero_point is not None:
        zero_point = torch.where(nothing, zero_point, start.to(torch.int32).reshape(observer.shape))
    return Encoding(spec, scale, zero_point)


def _symmetric(low: Tensor, high: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    steps = spec.qmax - spec.qmin
    widest = torch.maximum(high.abs(), low.abs()) / (steps / 2)
    scale = widest * (torch.arange(1, 102, dtype=torch.float64, device=low.device) / 100)[:, None]
    return scale, torch.full_like(scale, spec.qmin)


def _asymmetric(low: Tensor, high: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """Scales, 0 for skipped candidates, and the starts of their ranges in scales. Shape: [candidates, scales]."""
    steps = spec.qmax - spec.qmin
    widest = (high - low) / steps
    start = _rounded(low / widest)
    lowest = widest * start
    highest = lowest + widest * steps
    fraction = torch.arange(1, 18, dtype=torch.float64, device=low.device)[:, None, None] / 16
    places = torch.tensor([int(-steps + steps / 20 * i) for i in range(21)], dtype=torch.float64, device=low.device)
    first = widest * fraction * places[:, None]
    last = first + widest * fraction * steps
    wider = (first < lowest) & (last > highest)
    first, last = torch.maximum(first, lowest), torch.minimum(last, highest)
    skipped = wider | (last <= first)
    scale = torch.where(skipped, 0.0, (last - first) / steps).flatten(0, 1)
    begin = _rounded(first.flatten(0, 1) / scale.where(scale > 0, 1.0)).where(scale > 0, 0.0)
    return torch.cat([scale, widest[None]]), torch.cat([begin, start[None]])


def _cost(left: Tensor, shares: Tensor, scale: Tensor, start: Tensor, spec: QuantSpec, gamma: float) -> Tensor:
    """Shape: ``left`` and ``shares`` [scales, BINS]; the rest, and the result, [candidates, scales]."""
    steps = spec.qmax - spec.qmin
    width = left[:, 1] - left[:, 0]
    middles = left + width[:, None] / 2
    cost = torch.empty_like(scale)
    bins = torch.arange(BINS, device=left.device)
    for candidate, (step, first) in enumerate(zip(scale, start, strict=True)):
        step = step.where(step > 0, 1.0)
        ends = [((step * (first + far) - left[:, 0]) / width).floor().clamp(0, BINS - 1).long() for far in (0, steps)]
        below, above = bins < ends[0][:, None], bins >= ends[1][:, None]
        nearest = (_rounded(middles / step[:, None] - first[:, None]) + first[:, None]) * step[:, None]
        to_low, to_high = (middles - middles.gather(1, end[:, None]) for end in ends)
        clipped = to_low.square() * below + to_high.square() * above
        rounded = (middles - nearest).square() * ~(below | above)
        cost[candidate] = (shares * (rounded + gamma * clipped)).sum(1)
    return cost


def _rounded(x: Tensor) -> Tensor:
    """Half away from zero."""
    return (x.abs() + 0.5).floor() * x.sign()
