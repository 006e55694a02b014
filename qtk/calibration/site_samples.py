"""Keeps a sample of the values of every site while they are observed, of each member of a merged group on its own.

At the end of a calibration they are quantized with its encodings, and sites that lose too much are judged one by one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from qtk.calibration.clamped_values import CLAMPS, Bounds, clamped_values
from qtk.calibration.large_exponents import large_exponents
from qtk.calibration.marked_inputs import marked_inputs
from qtk.calibration.merged_members import MemberSamples
from qtk.calibration.sampled_values import some_values
from qtk.calibration.slices import SliceSamples
from qtk.calibration.uneven_channels import ChannelRanges, front_axes, uneven_channels
from qtk.calibration.width_check import FEWEST_CODES, FINE_DB, ZEROED, LargeStep, Loss, UnheldInput, UnheldSite, judged
from qtk.config.load import precise_in
from qtk.core.dtypes import FloatDtype
from qtk.core.encoding import HOST, Encoding, moved
from qtk.core.granularity import PerTensor
from qtk.core.needs import found_where
from qtk.core.site import Site
from qtk.core.spec import QuantSpec
from qtk.data.valid_tokens import ValidTokens
from qtk.graph.dynamic_steps import dynamic_steps
from qtk.graph.graphs import contents_of
from qtk.graph.simulation import Simulation
from qtk.graph.site_calls import SiteCalls
from qtk.numerics.affine import fake_quantize
from qtk.observers.observer import Observer
from qtk.operators.op_row import Precision, Role
from qtk.ops.simulate import simulate_dynamic
from qtk.quantizers.quantizer import Quantizer

CALLS = 4
"""First calls of a site of which values are kept; later ones if their number is a power of two."""

_BySpec: TypeAlias = dict[QuantSpec, list[tuple[Site, Tensor, Encoding]]]


class SiteSamples:
    """Keeps some of the values that observers see, for every site that calls a quantizer.

    Args:
        simulation: its graphs.
        quantizers: leader → quantizer, of which values are kept.
        tokens: which tokens count; observers get these alone already.

    Attributes:
        front: the sites that nothing but inputs and constants reach.
    """

    def __init__(
        self, simulation: Simulation, quantizers: Mapping[Site, Quantizer], tokens: ValidTokens | None = None
    ) -> None:
        self._quantizers = list(quantizers.values())
        self._leaders = {quantizer: site for site, quantizer in quantizers.items()}
        is_shared = any(decided.leader is not None for decided in simulation.plan.values())
        self._calls = SiteCalls(simulation, quantizers) if is_shared else None
        contents = contents_of(simulation.model)
        self._members = found_where({Role.MERGE}, contents, lambda: MemberSamples(simulation, quantizers, tokens), None)
        self._slices = SliceSamples(simulation, quantizers)
        axes = front_axes(
            simulation, {site for site, decided in simulation.plan.items() if (decided.leader or site) in quantizers})
        self.front, self._channels = list(axes), ChannelRanges(axes)
        self._values: dict[Site, list[Tensor]] = defaultdict(list)
        self._rounded: dict[Site, list[Tensor]] = defaultdict(list)
        self._seen: dict[Site, int] = defaultdict(int)
        self._on_host: tuple[Simulation, _BySpec] | None = None
        steps: dict[str, list[Site]] = found_where({"recurrent"}, contents, lambda: dynamic_steps(simulation), {})
        self._steps = {site for sites in steps.values() for site in sites}

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Calls in the body are told apart by their sites, and the first by the members of float merges."""
        with ExitStack() as following:
            for each in (self._calls, self._members):
                if each is not None:
                    following.enter_context(each.followed())
            yield

    @cached_property
    def members(self) -> Mapping[Site, dict[str, Tensor]]:
        """Some values of what has one range together, once all are kept.

        Site behind a float merge, or of which slices are read → name of an operand, or of the edge of a slice → values.
        """
        merged, sliced = {} if self._members is None else self._members.values, self._slices.values
        return {**sliced, **{site: {**sliced.get(site, {}), **members} for site, members in merged.items()}}

    def observers(self, observers: Mapping[Quantizer, Observer]) -> dict[Quantizer, Any]:
        """The observers, which keep samples too; where a quantizer has none, one that does nothing else."""
        others = [quantizer for quantizer in self._quantizers if quantizer not in observers]
        return {
            quantizer: _Sampled(partial(self._keep, quantizer), observers.get(quantizer))
            for quantizer in (*observers, *others)
        }

    def __or__(self, later: SiteSamples) -> SiteSamples:
        """These samples and the samples of ``later``, which replace these where both have some of a site."""
        both = copy(self)
        both._values = defaultdict(list, {**self._values, **later._values})
        both.members = {**self.members, **later.members}
        both._on_host = None
        both._rounded = defaultdict(list, {**self._rounded, **later._rounded})
        return both

    def unheld(self, simulation: Simulation) -> list[UnheldSite]:
        """The sites that their encodings do not hold, worst first."""
        precise, samples = precise_in(simulation.target), self._by_spec(simulation)
        contents = contents_of(simulation.model)
        large: dict[Site, LargeStep] = found_where(
            {Precision.EXPONENT}, contents, lambda: large_exponents(simulation), {})
        large |= self.uneven_channels(simulation)
        large |= {marked.site: marked.step for marked in marked_inputs(_by_site(samples), simulation)}
        clamped: dict[Site, Bounds] = found_where(CLAMPS, contents, lambda: clamped_values(simulation), {})
        found = [
            judged(site, simulation, values, encoding, precise, large.get(site), clamped.get(site))
            for spec, each in samples.items() for site, values, encoding in _in_question(spec, each, large)
        ]
        names = {each.name for each in found if each is not None}
        if self.members:
            found += self._unheld_members(simulation, precise, names, clamped)
        return sorted(filter(None, found), key=lambda each: (each.codes >= FEWEST_CODES, each.sqnr_db))

    def uneven_channels(self, simulation: Simulation) -> dict[Site, LargeStep]:
        """The sites in front of layers with channels in several units, see ``qtk.calibration.uneven_channels``."""
        return uneven_channels(self._channels, self.front, simulation)

    def marked_inputs(self, simulation: Simulation) -> list[UnheldInput]:
        """The inputs whose range is taken by markers, see ``qtk.calibration.marked_inputs``."""
        return marked_inputs(_by_site(self._by_spec(simulation)), simulation)

    def _unheld_members(
        self, simulation: Simulation, precise: Literal[16, "float"], named: Collection[str],
        clamped: Mapping[Site, Bounds],
    ) -> Iterator[UnheldSite]:
        """The operands of merges, and slices, that the range of a site, none of ``named``, does not hold."""
        for site, members in self.members.items():
            quantizer = None if site.name in named else simulation.quantizers.get(site)
            encoding = None if quantizer is None else quantizer.encoding
            if encoding is None or isinstance(encoding.spec.dtype, FloatDtype) or encoding.scale.numel() > 1:
                continue
            is_wide, on_host = precise != "float" and encoding.spec.dtype.bits >= precise, encoding.to(HOST)
            for name, values in members.items():
                lost = judged(site, simulation, values[values.isfinite()].to(HOST), on_host,
                                 "float" if is_wide else precise, None, clamped.get(site))
                if lost is not None:
                    others = ", ".join(other for other in members if other != name) or "its other values"
                    yield replace(lost, name=f"{site.name} of {name}",
                                  reason=f"{lost.reason}, as it shares a range with {others}")

    def is_held_at_run_time(self, site: Site, bits: int) -> bool:
        """Says whether a width holds the values of a site that is quantized dynamically, as far as was seen.

        It does not, whatever their SQNR, where most of them become 0: the small ones may be a feature of their own.
        """
        if not self._rounded.get(site):
            return True
        values, rounded = (torch.cat(kept[site]).float() for kept in (self._values, self._rounded))
        is_finite = values.isfinite()
        loss = Loss.of(values[is_finite], rounded[is_finite])
        return loss.reason(bits) is None and loss.zeroed <= ZEROED

    def largest(self, site: Site) -> float:
        """The largest absolute value that was kept of a site; 0 if none was."""
        kept = self._values.get(site)
        return float(torch.cat(kept).abs().nan_to_num(posinf=0.0).amax()) if kept else 0.0

    def _by_spec(self, simulation: Simulation) -> _BySpec:
        """The sites whose range is known and of one tensor, with finite values of theirs, on the CPU.

        Waits for the device once for each simulation: it is asked when all encodings of one are known.
        """
        if self._on_host is not None and self._on_host[0] is simulation:
            return self._on_host[1]
        plan, quantizers = simulation.plan, simulation.quantizers
        sites = [
            site for site in self._values
            if site in plan and isinstance(plan[site].spec.granularity, PerTensor)
            and not isinstance(plan[site].spec.dtype, FloatDtype)
        ]
        ranges = [quantizers[site].range() for site in sites]
        known = [tensor for each in ranges for tensor in each if tensor is not None]
        on_host = iter(moved([*(torch.cat(self._values[site]).float() for site in sites), *known], HOST))  # one wait
        values = [next(on_host) for _ in sites]
        samples: _BySpec = defaultdict(list)
        for site, kept, (scale, zero_point) in zip(sites, values, ranges, strict=True):
            tensors = (None if tensor is None else next(on_host) for tensor in (scale, zero_point))
            encoding = quantizers[site].encoding_of(*tensors)
            if encoding is not None:
                samples[encoding.spec].append((site, kept[kept.isfinite()], encoding))
        self._on_host = simulation, samples
        return samples

    def _keep(self, quantizer: Quantizer, x: Tensor) -> None:
        site = self._leaders[quantizer] if self._calls is None else self._calls.site_of_next(quantizer)
        self._seen[site] += 1
        seen = self._seen[site]
        if x.numel() and (seen <= CALLS or seen & (seen - 1) == 0):
            self._values[site].append(some_values(x.detach()))
            self._slices.keep(site, x)
            self._channels.keep(site, x)
            if site in self._steps:  # ``is_held_at_run_time`` is asked of these alone
                self._rounded[site].append(some_values(simulate_dynamic(x.detach(), quantizer.spec)))


class _Sampled:
    """What a quantizer calls in place of an observer."""

    def __init__(self, keep: Callable[[Tensor], None], observer: Observer | None) -> None:
        self._keep, self._observer = keep, observer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._observer, name)

    def observe(self, x: Tensor) -> None:
        self._keep(x)
        if self._observer is not None:
            self._observer.observe(x)


def _by_site(samples: _BySpec) -> dict[Site, tuple[Tensor, Encoding]]:
    return {site: (values, encoding) for of_spec in samples.values() for site, values, encoding in of_spec}


def _in_question(
    spec: QuantSpec, samples: Sequence[tuple[Site, Tensor, Encoding]], large: Container[Site]
) -> Iterator[tuple[Site, Tensor, Encoding]]:
    """The samples of sites with ``large`` steps, of one value, or that lose enough to be named; rounds all together."""
    values = pad_sequence([kept for _, kept, _ in samples], batch_first=True)  # 0 is rounded to itself
    scale = torch.stack([encoding.scale for *_, encoding in samples])
    zeros = [encoding.zero_point for *_, encoding in samples if encoding.zero_point is not None]
    zero_point = torch.stack(zeros) if zeros else None
    rounded = fake_quantize(values, scale, zero_point, (1, values.shape[1]), int(spec.qmin), int(spec.qmax))
    noise = (rounded - values).double().square().sum(1)
    loses = noise * 10 ** (FINE_DB / 10) > values.double().square().sum(1)
    for sample, is_lossy in zip(samples, loses.tolist(), strict=True):
        if is_lossy or sample[0] in large or not sample[1].numel() or bool((sample[1] == sample[1][0]).all()):
            yield sample
