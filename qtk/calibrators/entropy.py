"""The range whose codes lose the least information: Kullback-Leibler divergence, as TensorRT and ONNX Runtime do.

For a range, P is the histogram with what lies outside added to the outermost occupied bins inside, and Q the histogram
inside with each code's count spread evenly over its occupied bins; both as shares. ``KL(P ‖ Q) = Σ P · log(P / Q)``,
less what chance alone adds in n elements, 1/2n for every occupied bin of a code but one (Miller and Madow).
A bin belongs to the code nearest to its middle. Real 0 is exact in every range, so the bin it is in counts no more than
its neighbours: the zeros of a ReLU would otherwise decide alone. (S. Migacz, 8-bit inference with TensorRT, GTC 2017.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.special import xlogy

from qtk.calibrators.search import Sampled, choose_all, sampler
from qtk.core.dtypes import FloatDtype
from qtk.core.encoding import Encoding
from qtk.core.granularity import Granularity, PerChannel
from qtk.core.spec import QuantSpec
from qtk.errors import CalibrationError
from qtk.numerics.ranges import choose_range
from qtk.observers.histogram import Histogram
from qtk.observers.observer import Observer
from qtk.observers.weighted_samples import WeightedSamples

ELEMENTS_A_BIN = 16
ROUNDING = 1e-12
"""Divergences this near are equal."""
AT_ONCE = 1 << 18
"""Ends of codes looked up together."""


@dataclass(frozen=True, slots=True)
class Entropy:
    """Of the ranges ``i/steps`` times what was seen, i = 1…steps, takes the one of least divergence.

    The widest of equal ones wins. A distribution needs 16 elements a bin and more bins than codes: a scale with fewer
    of either keeps its whole range. So do the channels of most weights, as in the tools named above, and small floats.

    Args:
        bins: of the histograms, at least so many over the range.
        steps: number of ranges tried.
    """

    bins: int = 2048
    steps: int = 100

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise CalibrationError(f"steps must be at least 1, got {self.steps}")

    def observer(self, granularity: Granularity, *, static: bool = False) -> Sampled:
        return sampler(granularity, static=static, bins=self.bins)

    def encodings(self, observers: Sequence[Observer], specs: Sequence[QuantSpec]) -> list[Encoding]:
        """The encodings of least divergence. Raises: CalibrationError if a scale saw nothing."""
        return choose_all(observers, specs, self._choose)

    def _choose(self, points: WeightedSamples, spec: QuantSpec) -> tuple[Tensor, Tensor | None]:
        levels = spec.qmax - spec.qmin + 1
        fewest = ELEMENTS_A_BIN * self.bins
        few = points.counts is None and points.values.shape[1] < fewest
        if few or self.bins <= levels or isinstance(spec.dtype, FloatDtype):
            return choose_range(points.low, points.high, spec)
        if bool((points.reach == 0).all()):
            points = self._counted(points)
        enough = torch.as_tensor(points.counts).sum(1) >= fewest
        points = _without_zeros(points)
        fractions = torch.arange(self.steps, 0, -1, dtype=torch.float64, device=points.low.device) / self.steps
        divergences = torch.cat([
            self._divergences(points, chosen, spec)
            for chosen in fractions.split(max(1, AT_ONCE // int(points.scales * levels)))  # type: ignore[no-untyped-call]
        ])
        least = divergences <= divergences.amin(0) + ROUNDING
        fraction = torch.where(enough, fractions[least.to(torch.int8).argmax(0)], 1.0)
        return choose_range(points.low * fraction, points.high * fraction, spec)

    def _counted(self, points: WeightedSamples) -> WeightedSamples:
        """Single elements as a histogram."""
        observer = Histogram(PerChannel(0), bins=self.bins)
        values = points.values if points.counts is None else points.values.masked_fill(points.counts == 0, -torch.inf)
        observer.observe(values.to(torch.float32))
        return observer.points()

    def _divergences(self, points: WeightedSamples, fractions: Tensor, spec: QuantSpec) -> Tensor:
        """KL(P ‖ Q) of every range, infinite where nothing lies inside. Shape: [fractions, scales]."""
        counts = torch.as_tensor(points.counts).to(torch.float64)
        ends = _ends_of_codes(points.low * fractions[:, None], points.high * fractions[:, None], spec)
        found = torch.searchsorted(points.values, ends.transpose(0, 1).reshape(points.scales, -1).contiguous())
        cuts = found.reshape(points.scales, len(fractions), -1).transpose(0, 1).contiguous()
        mass, occupied, terms = (
            _sums(of, cuts) for of in (counts, (counts > 0).double(), xlogy(counts, counts))
        )
        inside, total = mass.sum(-1), counts.sum(1)
        even = mass / occupied.clamp(min=1)  # what Q has in each occupied bin of a code
        divergence: Tensor = terms.sum(-1) - xlogy(mass, even).sum(-1)
        first, last = cuts[..., 0], cuts[..., -1]
        below = _looked_up(_cumulated(counts), first)
        above = total - _looked_up(_cumulated(counts), last)
        lowest, highest = _outermost(counts, first, last)

        def folded(bin: Tensor, own: Tensor, outside: Tensor) -> Tensor:
            """What a bin of ``own`` elements adds when those ``outside`` are counted there too, in P alone."""
            code = torch.searchsorted(cuts, bin[..., None].contiguous(), right=True) - 1
            spread = even.gather(-1, code.clamp(0, even.shape[-1] - 1))[..., 0]
            both = own + outside
            added: Tensor = xlogy(both, both) - xlogy(own, own) - xlogy(outside, spread)
            return added

        divergence += folded(lowest, _looked_up(counts, lowest), below)
        divergence += folded(highest, _looked_up(counts, highest) + below.where(lowest == highest, 0), above)
        chance = (occupied - 1).clamp(min=0).sum(-1) / 2
        divergence = torch.log(inside / total) + (divergence - chance) / total
        return divergence.masked_fill(inside == 0, torch.inf).nan_to_num(nan=torch.inf)


def _without_zeros(points: WeightedSamples) -> WeightedSamples:
    """The bin that holds 0 with no more elements than the fuller of its neighbours."""
    counts = torch.as_tensor(points.counts)
    own = (points.values < 0).sum(1, keepdim=True).clamp(max=counts.shape[1] - 1)  # 0 is the left edge of a bin
    beside = torch.nn.functional.pad(counts, (1, 1))  # bin i is at i + 1
    most = torch.maximum(beside.gather(1, own), beside.gather(1, own + 2))
    found = counts.gather(1, own)
    holds = ((points.low <= 0) & (points.high >= 0))[:, None]
    return replace(points, counts=counts.scatter(1, own, torch.where(holds, torch.minimum(found, most), found)))


def _ends_of_codes(low: Tensor, high: Tensor, spec: QuantSpec) -> Tensor:
    """Half a code below the first, between any two, half above the last. Shape: as ``low`` and [codes + 1]."""
    scale, zero_point = choose_range(low, high, spec)
    zero = torch.zeros_like(scale) if zero_point is None else zero_point
    halves = torch.arange(int(spec.qmin), int(spec.qmax) + 2, dtype=torch.float64, device=scale.device) - 0.5
    return (halves - zero[..., None]) * scale[..., None].to(torch.float64)


def _outermost(counts: Tensor, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """First and last occupied bin of ``first``…``last - 1``. Shape: ``first``, ``last`` [fractions, scales]; alike."""
    end = counts.shape[1] - 1
    places = torch.arange(end + 1, device=counts.device)
    following = torch.where(counts > 0, places, end).flip(1).cummin(1).values.flip(1)
    preceding = torch.where(counts > 0, places, 0).cummax(1).values
    return _looked_up(following, first.clamp(max=end)), _looked_up(preceding, (last - 1).clamp(min=0))


def _looked_up(values: Tensor, places: Tensor) -> Tensor:
    """Shape: ``values`` [scales, bins], ``places`` [fractions, scales]; result as ``places``."""
    return values.gather(1, places.t()).t()


def _cumulated(values: Tensor) -> Tensor:
    """Sums of all before each place, and of all. Shape: [scales, bins] → [scales, bins + 1]."""
    return torch.nn.functional.pad(values.cumsum(1), (1, 0))


def _sums(values: Tensor, cuts: Tensor) -> Tensor:
    """Shape: ``values`` [scales, bins], ``cuts`` [fractions, scales, codes + 1]; result [fractions, scales, codes]."""
    fractions, scales, _ = cuts.shape
    taken = _cumulated(values).gather(1, cuts.transpose(0, 1).reshape(scales, -1))
    return torch.diff(taken.reshape(scales, fractions, -1).transpose(0, 1), dim=-1)
