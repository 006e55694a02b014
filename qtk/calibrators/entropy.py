"""The range of least Kullback-Leibler divergence between values and codes, as in TensorRT and ONNX Runtime.

For a range, P is the histogram with counts outside added to the outermost occupied bins inside, Q the histogram inside
with each code's count spread evenly over its occupied bins; both are normalized. ``KL(P ‖ Q) = Σ P · log(P / Q)``,
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
from qtk.core.bounds import check_count
from qtk.core.dtypes import FloatDtype
from qtk.core.encoding import Encoding
from qtk.core.granularity import Granularity, PerChannel
from qtk.core.spec import QuantSpec
from qtk.numerics.ranges import covering_range
from qtk.observers.histogram import Histogram
from qtk.observers.observer import Observer
from qtk.observers.weighted_samples import WeightedSamples
from qtk.public import public

ELEMENTS_A_BIN = 16
MOST_STEPS = 10_000
NARROWEST = 1 / 16
"""Part of the observed range: 128 of 2,048 bins, with which TensorRT begins."""
ROUNDING = 1e-12
"""Divergences closer than this count as equal."""
AT_ONCE = 1 << 18
"""Boundaries of codes looked up together, at most."""


@public
@dataclass(frozen=True, slots=True)
class Entropy:
    """Minimises the divergence over ``i/steps`` times the observed range, i up to steps.

    Ranges have as many bins as codes at least, and a sixteenth of all: in narrower ones each bin has a code of its own,
    and what they clip hardly counts. The widest of equal ranges wins. A scale with fewer than 16 elements per bin, or
    no more bins than codes, keeps its full range, as in the tools named above; so do the channels of most weights.
    Floating-point formats keep it too.

    Args:
        bins: smallest number of histogram bins over the range.
        steps: number of ranges tried.

    Raises: CalibrationError if ``steps`` is not 1 to 10,000.
    """

    bins: int = 2048
    steps: int = 100

    def __post_init__(self) -> None:
        check_count("steps of entropy", self.steps, MOST_STEPS)

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
            return covering_range(samples.low, samples.high, spec)
        if not samples.binned:
            samples = self._counted(samples)
        enough = torch.as_tensor(samples.counts).sum(1) >= fewest
        samples = _without_zeros(samples)
        fractions = torch.arange(self.steps, 0, -1, dtype=torch.float64, device=samples.low.device) / self.steps
        fractions = fractions[fractions >= max(levels / self.bins, NARROWEST)]
        divergences = torch.cat([
            self._divergences(samples, some_fractions, spec)
            for some_fractions in fractions.split(max(1, AT_ONCE // int(samples.scales * levels)))  # type: ignore[no-untyped-call]
        ])
        least = divergences <= divergences.amin(0) + ROUNDING
        fraction = torch.where(enough, fractions[least.to(torch.int8).argmax(0)], 1.0)
        return covering_range(samples.low * fraction, samples.high * fraction, spec)

    def _counted(self, samples: WeightedSamples) -> WeightedSamples:
        """Single elements, counted in a histogram."""
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
        bins = torch.searchsorted(samples.values, ends.transpose(0, 1).reshape(samples.scales, -1).contiguous())
        cuts = bins.reshape(samples.scales, len(fractions), -1).transpose(0, 1).contiguous()
        mass, occupied, terms = (
            _sums(summand, cuts) for summand in (counts, (counts > 0).double(), xlogy(counts, counts))
        )
        inside, total = mass.sum(-1), counts.sum(1)
        even = mass / occupied.clamp(min=1)  # count in Q of each occupied bin of a code
        divergence: Tensor = terms.sum(-1) - xlogy(mass, even).sum(-1)
        first, last = cuts[..., 0], cuts[..., -1]
        below = _looked_up(_cumulated(counts), first)
        above = total - _looked_up(_cumulated(counts), last)
        lowest, highest = _outermost(counts, first, last)

        def folded(bin: Tensor, inside: Tensor, outside: Tensor) -> Tensor:
            """Change of the divergence when P counts ``outside`` elements in a bin with ``inside`` elements."""
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
    """The samples with the count of the bin that holds 0 limited to the count of the fuller neighbour."""
    counts = torch.as_tensor(samples.counts)
    zero_bin = (samples.values < 0).sum(1, keepdim=True).clamp(max=counts.shape[1] - 1)  # 0 is the left edge of a bin
    padded = torch.nn.functional.pad(counts, (1, 1))  # bin i is at i + 1
    limit = torch.maximum(padded.gather(1, zero_bin), padded.gather(1, zero_bin + 2))
    count = counts.gather(1, zero_bin)
    holds_zero = ((samples.low <= 0) & (samples.high >= 0))[:, None]
    limited = torch.where(holds_zero, torch.minimum(count, limit), count)
    return replace(samples, counts=counts.scatter(1, zero_bin, limited))


def _ends_of_codes(low: Tensor, high: Tensor, spec: QuantSpec) -> Tensor:
    """The boundaries of the codes, from half a step below the first to half a step above the last.

    Shape: as ``low``, and [codes + 1].
    """
    scale, zero_point = covering_range(low, high, spec)
    zero = torch.zeros_like(scale) if zero_point is None else zero_point
    halves = torch.arange(int(spec.qmin), int(spec.qmax) + 2, dtype=torch.float64, device=scale.device) - 0.5
    return (halves - zero[..., None]) * scale[..., None].to(torch.float64)


def _outermost(counts: Tensor, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """First and last occupied bin of ``first``…``last - 1``. Shape: as ``first``; ``counts`` [scales, bins]."""
    end = counts.shape[1] - 1
    bins = torch.arange(end + 1, device=counts.device)
    following = torch.where(counts > 0, bins, end).flip(1).cummin(1).values.flip(1)
    preceding = torch.where(counts > 0, bins, 0).cummax(1).values
    return _looked_up(following, first.clamp(max=end)), _looked_up(preceding, (last - 1).clamp(min=0))


def _looked_up(values: Tensor, bins: Tensor) -> Tensor:
    """``values`` at ``bins``. Shape: ``values`` [scales, bins], ``bins`` and result [fractions, scales]."""
    return values.gather(1, bins.t()).t()


def _cumulated(values: Tensor) -> Tensor:
    """Sums of the values before each bin, and of all. Shape: [scales, bins] → [scales, bins + 1]."""
    return torch.nn.functional.pad(values.cumsum(1), (1, 0))


def _sums(values: Tensor, cuts: Tensor) -> Tensor:
    """Sums of the bins of each code.

    Shape: ``values`` [scales, bins], ``cuts`` [fractions, scales, codes + 1]; result [fractions, scales, codes].
    """
    fractions, scales, _ = cuts.shape
    taken = _cumulated(values).gather(1, cuts.transpose(0, 1).reshape(scales, -1))
    return torch.diff(taken.reshape(scales, fractions, -1).transpose(0, 1), dim=-1)
