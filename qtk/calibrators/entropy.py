"""The range of least Kullback-Leibler divergence between values and codes, as in TensorRT and ONNX Runtime.

For a range, P is the histogram with what lies outside added to the outermost occupied bins inside, and Q the histogram
inside with each code's count spread evenly over its occupied bins; both as shares. ``KL(P ‖ Q) = Σ P · log(P / Q)``,
less the bias of n samples, 1/2n for every occupied bin of a code but one (Miller and Madow).
A bin belongs to the code nearest to its middle. Real 0 is exact in every range, so its bin is given at most the
count of its neighbours: the zeros of a ReLU would otherwise dominate. (S. Migacz, 8-bit inference with
TensorRT, GTC 2017.)
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
"""Divergences closer than this count as equal."""
AT_ONCE = 1 << 18
"""Boundaries of codes searched together."""


@dataclass(frozen=True, slots=True)
class Entropy:
    """Of the ranges ``i/steps`` times what was seen, i = 1…steps, takes the one of least divergence.

    The widest of equal ranges wins. A scale with fewer than 16 elements a bin, or no more bins than codes, keeps its
    full range: so do the channels of most weights, as in the tools named above. Floating-point formats keep it too.

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

    def _choose(self, samples: WeightedSamples, spec: QuantSpec) -> tuple[Tensor, Tensor | None]:
        levels = spec.qmax - spec.qmin + 1
        fewest = ELEMENTS_A_BIN * self.bins
        few = samples.counts is None and samples.values.shape[1] < fewest
        if few or self.bins <= levels or isinstance(spec.dtype, FloatDtype):
            return choose_range(samples.low, samples.high, spec)
        if bool((samples.reach == 0).all()):
            samples = self._counted(samples)
        enough = torch.as_tensor(samples.counts).sum(1) >= fewest
        samples = _without_zeros(samples)
        fractions = torch.arange(self.steps, 0, -1, dtype=torch.float64, device=samples.low.device) / self.steps
        divergences = torch.cat([
            self._divergences(samples, chosen, spec)
            for chosen in fractions.split(max(1, AT_ONCE // int(samples.scales * levels)))  # type: ignore[no-untyped-call]
        ])
        least = divergences <= divergences.amin(0) + ROUNDING
        fraction = torch.where(enough, fractions[least.to(torch.int8).argmax(0)], 1.0)
        return choose_range(samples.low * fraction, samples.high * fraction, spec)

    def _counted(self, samples: WeightedSamples) -> WeightedSamples:
        """A histogram of single elements."""
        observer = Histogram(PerChannel(0), bins=self.bins)
        values = samples.values
        if samples.counts is not None:
            values = values.masked_fill(samples.counts == 0, -torch.inf)
        observer.observe(values.to(torch.float32))
        return observer.samples()

    def _divergences(self, samples: WeightedSamples, fractions: Tensor, spec: QuantSpec) -> Tensor:
        """KL(P ‖ Q) of every range, infinite where nothing lies inside. Shape: [fractions, scales]."""
        counts = torch.as_tensor(samples.counts).to(torch.float64)
        ends = _ends_of_codes(samples.low * fractions[:, None], samples.high * fractions[:, None], spec)
        found = torch.searchsorted(samples.values, ends.transpose(0, 1).reshape(samples.scales, -1).contiguous())
        cuts = found.reshape(samples.scales, len(fractions), -1).transpose(0, 1).contiguous()
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

        def folded(bin: Tensor, inside: Tensor, outside: Tensor) -> Tensor:
            """What the ``outside`` elements add when P counts them in a bin that has ``inside`` elements."""
            code = torch.searchsorted(cuts, bin[..., None].contiguous(), right=True) - 1
            spread = even.gather(-1, code.clamp(0, even.shape[-1] - 1))[..., 0]
            both = inside + outside
            added: Tensor = xlogy(both, both) - xlogy(inside, inside) - xlogy(outside, spread)
            return added

        divergence += folded(lowest, _looked_up(counts, lowest), below)
        divergence += folded(highest, _looked_up(counts, highest) + below.where(lowest == highest, 0), above)
        chance = (occupied - 1).clamp(min=0).sum(-1) / 2
        divergence = torch.log(inside / total) + (divergence - chance) / total
        return divergence.masked_fill(inside == 0, torch.inf).nan_to_num(nan=torch.inf)


def _without_zeros(samples: WeightedSamples) -> WeightedSamples:
    """The samples with the count of the bin that holds 0 limited to that of its fuller neighbour."""
    counts = torch.as_tensor(samples.counts)
    own = (samples.values < 0).sum(1, keepdim=True).clamp(max=counts.shape[1] - 1)  # 0 is the left edge of a bin
    beside = torch.nn.functional.pad(counts, (1, 1))  # bin i is at i + 1
    most = torch.maximum(beside.gather(1, own), beside.gather(1, own + 2))
    found = counts.gather(1, own)
    holds = ((samples.low <= 0) & (samples.high >= 0))[:, None]
    return replace(samples, counts=counts.scatter(1, own, torch.where(holds, torch.minimum(found, most), found)))


def _ends_of_codes(low: Tensor, high: Tensor, spec: QuantSpec) -> Tensor:
    """The boundaries of the codes, from half a step below the first to half a step above the last.

    Shape: as ``low``, and [codes + 1].
    """
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
