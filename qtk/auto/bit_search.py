"""Searches the widths of a simulation's sites: estimates, an exact optimum of their sum, and what it really is."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

from tqdm import tqdm

from qtk.algorithms.frontier import Frontier, frontier
from qtk.analysis.float_outputs import FloatOutputs
from qtk.analysis.sensitivity import Loss, sensitivity
from qtk.auto.bit_assignment import Assigned, BitAssignment, MeasuredWidths
from qtk.auto.latency import LatencyModel, OpLatencies, WholeLatency
from qtk.auto.matrix_products import MatrixProduct, matrix_products
from qtk.auto.site_rules import SiteRules
from qtk.auto.widths import (
    UNITS,
    Choice,
    Costs,
    Member,
    bit_operations,
    bits_of,
    in_pairs,
    members,
    quantized_bytes,
    setting_of,
    single,
    weights_of,
)
from qtk.calibration.calibrate import CalibrationData
from qtk.config.schema import QuantConfig
from qtk.core.plan import leaders
from qtk.data.forward_pass import Batch, outputs, run_batch
from qtk.data.sequences import Sequences
from qtk.errors import CalibrationError, ExportError
from qtk.graph.footprint import footprint
from qtk.graph.insert import drop_sites
from qtk.layerwise.float_weights import FloatWeights
from qtk.quantizers.modes import in_mode
from qtk.quantizers.quantizer import Mode
from qtk.quantsim import QuantSim
from qtk.transforms.rewrite import replan_simulation

T = TypeVar("T")

ROUNDS = 6
"""Assignments that are measured in the runtime before the best of them is taken."""


@dataclass(slots=True)
class _Estimates:
    """What is known of members by choice.

    ``losses``, ``sizes``: [members, choices], in the unit of the loss and in bytes; ``left``: bytes of all other
    parameters; ``elements``: of the weights of each member; ``others``: what all other sites lose.
    """

    losses: list[list[float]]
    sizes: list[list[float]]
    left: float
    elements: list[int]
    others: float

    def loss(self, picks: Sequence[int]) -> float:
        """The sum of what all sites lose, sites that keep their width included."""
        return self.others + sum(losses[pick] for losses, pick in zip(self.losses, picks, strict=True))


class BitSearch:
    """The search on a copy of the simulation, which alone changes until ``apply``.

    Args:
        sim: the simulation.
        data: batches in memory.
        kind: what the budget counts, a key of ``UNITS``.
        choices: the widths, rising.
        loss: as for ``sensitivity``.
    """

    def __init__(
        self, sim: QuantSim, data: CalibrationData, kind: str, choices: tuple[Choice, ...], loss: Loss | None
    ) -> None:
        self._sim, self._data, self._kind, self._choices, self._loss = sim, data, kind, choices, loss
        self._batches = cast(list[Batch] | Sequences, data.batches)
        self._rules = SiteRules(sim.simulation)
        self._members = members(sim.simulation, only_weights=kind in ("bytes", "weight_bits"))
        self._trial = copy.deepcopy(sim)
        self._float: FloatOutputs | None = None
        self._products: list[MatrixProduct] = []

    def found(self, limit: float) -> BitAssignment:
        """The best assignment. Raises: CalibrationError if there is none."""
        estimates = self._estimates()
        if not self._members:
            raise CalibrationError("no site can have a width of its own: all are frozen, learned or rounded, or no "
                                   "gradient reaches them; print(sim.plan) shows what is quantized")
        equal = [(choice,) * len(self._members) for choice in range(len(self._choices))]
        equal = [each for each in equal if not self._quantizes_nothing(each)]
        if self._kind == "milliseconds":
            costs, best, tried = self._in_time(limit, estimates, equal)
        else:
            costs = self._costs(estimates)
            best = frontier(estimates.losses, costs.terms)
            picks = self._within(limit, best, costs)
            tried = {each: costs.of(each) for each in (picks, *equal)}
        measured = {each: MeasuredWidths(self._name(each, equal), cost, self._measured(each), estimates.loss(each),
                                   cost <= limit) for each, cost in self._bar(tried.items(), "measuring", "assignment")}
        fitting = [each for each, row in measured.items() if row.fits]
        if not fitting:
            fastest = min(row.cost for row in measured.values())
            raise CalibrationError(f"no assignment was measured at {limit:,.6g} {UNITS[self._kind]} or below, the "
                                   f"least is {fastest:,.6g}; raise the budget, or add narrower choices")
        taken = min(fitting, key=lambda each: measured[each].loss)
        others = [row for each, row in measured.items() if each != taken]
        return self._result(limit, best, costs.fixed, estimates, taken, [measured[taken], *others])

    def _within(self, limit: float, best: Frontier, costs: Costs) -> tuple[int, ...]:
        """The choices that lose least within the budget. Raises: CalibrationError if it is too small."""
        index = best.within(limit - costs.fixed)
        if index is None:
            least = costs.fixed + float(best.costs[0])
            raise CalibrationError(f"the budget of {limit:,.6g} {UNITS[self._kind]} is below the least that "
                                   f"{list(self._choices)} can reach, {least:,.6g}; raise it, or add narrower choices")
        return tuple(int(pick) for pick in best.picks[index])

    def _name(self, picks: tuple[int, ...], equal: list[tuple[int, ...]]) -> str:
        if picks not in equal:
            return "assigned"
        width = self._choices[picks[0]]
        return "all float" if width == "float" else f"all {width} bits"

    def _in_time(
        self, limit: float, estimates: _Estimates, equal: list[tuple[int, ...]]
    ) -> tuple[Costs, Frontier, dict[tuple[int, ...], float]]:
        """The latencies by choices, the best choices, and the assignments whose latency was measured."""
        known, whole = OpLatencies(self._sim.config), WholeLatency(self._trial.model, self._sim.example_inputs)
        products = self._bar(self._products, "latency of products", "product")
        latency = LatencyModel(in_pairs(products, self._members, self._choices, self._sim.plan, known.ms))
        half, count = len(self._members) // 2, len(self._members)
        ends = (*equal, (0,) * half + (len(self._choices) - 1,) * (count - half))  # should one of the equal be missing
        ratios = {each: self._ratio(each, whole) for each in ends[:max(2, len(equal))]}
        tried = {each: ratio * whole.first_ms for each, ratio in ratios.items()}
        latency.fit(list(tried), list(tried.values()))
        for _ in range(ROUNDS):
            best = frontier(estimates.losses, latency.costs.terms)
            if best.within(limit - latency.costs.fixed) is None and min(tried.values()) <= limit:
                break  # what was measured decides
            picks = self._within(limit, best, latency.costs)
            if picks in tried:
                break
            try:
                ratios[picks] = self._ratio(picks, whole)
            except ExportError as error:
                warnings.warn(f"the runtime refuses a mix of widths, so that fewer were measured: {error}",
                              stacklevel=6)
                break
            tried = {each: ratio * whole.first_ms for each, ratio in ratios.items()}
            latency.correct(tried, limit)
        return latency.costs, best, tried

    def _ratio(self, picks: Sequence[int], whole: WholeLatency) -> float:
        self._plan(picks)
        return whole.ratio(self._trial, progress=self._data.progress)

    def apply(self, config: QuantConfig) -> None:
        """Gives the simulation itself a plan, and the encodings that the copy has by it."""
        self._plan_by(config)
        replan_simulation(self._sim, config)
        masked = self._trial.simulation.dropped
        if found := {site: why for site, why in masked.items() if site in self._sim.plan}:
            self._sim.simulation = drop_sites(self._sim.simulation, found)
        for name, quantizer in self._sim.quantizers.items():
            encoding = self._trial.quantizers[name].encoding
            if quantizer.encoding is None and encoding is not None:
                quantizer.load_encoding(encoding)
        self._sim.check()

    def _bar(self, steps: Collection[T], label: str, unit: str) -> Iterable[T]:
        return tqdm(steps, desc=label, unit=unit, disable=not self._data.progress)

    def _plan(self, picks: Sequence[int]) -> None:
        """Gives the copy these choices. Raises: CalibrationError if nothing would be quantized."""
        config = self._config(picks)
        if self._quantizes_nothing(picks):
            raise CalibrationError("the budget has room for the whole model in float: there is nothing to quantize; "
                                   "lower it")
        self._plan_by(config)

    def _quantizes_nothing(self, picks: Sequence[int]) -> bool:
        inside = {site for member in self._members for site in member.sites}
        others = set(leaders(self._sim.plan)) - inside
        return not others and all(self._choices[pick] == "float" for pick in picks)

    def _plan_by(self, config: QuantConfig) -> None:
        replan_simulation(self._trial, config)
        self._trial.compute_encodings(self._batches, only_missing=True, forward=self._data.forward,
                                      valid=self._data.valid, progress=False)

    def _config(self, picks: Sequence[int]) -> QuantConfig:
        """The simulation's config with a rule for each width."""
        config = self._sim.config
        for index, width in enumerate(self._choices):
            sites = [site for member, pick in zip(self._members, picks, strict=True) if pick == index
                     for site in member.sites]
            config = self._rules.joined(config, sites, setting_of(width))
        return config

    def _estimates(self) -> _Estimates:
        """Estimates for all members; a member that no gradient reaches, or that carries a mask, keeps its width."""
        rows: list[dict[str, float]] = []
        sizes: list[list[float]] = []
        weights, increases = weights_of(self._sim.simulation, self._members), dict[str, float]()
        for index, width in enumerate(self._bar(self._choices, "estimating", "width")):
            if width == "float":
                rows.append({})
                sizes.append([float(sum(each.numel() * each.element_size() for each in of)) for of in weights])
                continue
            self._plan([index] * len(self._members))
            found = sensitivity(self._trial.simulation, self._batches, loss=self._loss, top=0, progress=False,
                                forward=self._data.forward, valid=self._data.valid if self._loss is None else None)
            increases = {row.name: row.increase for row in found}
            rows.append(increases)
            sizes.append(quantized_bytes(self._trial.simulation, self._members))
        if self._kind in ("bit_operations", "milliseconds"):
            self._products = matrix_products(self._trial.simulation,
                                             lambda: run_batch(self._trial.model, self._sim.example_inputs))
        losses = [[sum(row.get(site.name, 0.0) for site in member.sites) for row in rows] for member in self._members]
        known = [index for index, member in enumerate(self._members)
                 if self._can_be_set(member) and not any(map(math.isnan, losses[index]))]
        self._members = [self._members[index] for index in known]
        assigned = {site.name for member in self._members for site in member.sites}
        others = sum(max(0.0, loss) for name, loss in increases.items() if name not in assigned)
        left = footprint(self._sim.model).quantized_bytes - sum(quantized_bytes(self._sim.simulation, self._members))
        return _Estimates([[max(0.0, loss) for loss in losses[index]] for index in known],
                          [[size[index] for size in sizes] for index in known], left,
                          [sum(each.numel() for each in weights[index]) for index in known], others)

    def _can_be_set(self, member: Member) -> bool:
        """Says whether calibration left the member quantized, and latencies depend on it if they are asked for."""
        multiplied = {site for product in self._products for site in product.operands}
        return all(site in self._trial.simulation.quantizers for site in member.sites) and (
            self._kind != "milliseconds" or not multiplied.isdisjoint(member.sites))

    def _costs(self, estimates: _Estimates) -> Costs:
        """Returns what an assignment costs in the unit of the budget."""
        if self._kind == "bytes":
            return single(estimates.sizes, estimates.left)
        if self._kind == "weight_bits":
            every = sum(estimates.elements)
            return single([[bits_of(width) * count / every for width in self._choices] for count in estimates.elements],
                          0.0)
        return in_pairs(self._products, self._members, self._choices, self._sim.plan, bit_operations)

    def _measured(self, picks: Sequence[int]) -> float:
        """The loss of the copy with these widths, calibrated."""
        self._plan(picks)
        quantizers, model = list(self._trial.quantizers.values()), self._trial.model
        if self._loss is not None:
            made = outputs(model, self._batches, forward=self._data.forward)
            losses = [float(self._loss(output, batch)) for output, batch in zip(made, self._batches, strict=True)]
            return sum(losses) / len(losses)
        if self._float is None:
            with in_mode(quantizers, Mode.BYPASS), FloatWeights(self._trial.simulation).in_place():
                self._float = FloatOutputs(model, self._batches, self._data.forward, self._data.valid)
        return self._float.error(model)

    def _result(
        self, limit: float, best: Frontier, fixed: float, estimates: _Estimates, picks: Sequence[int],
        measured: Sequence[MeasuredWidths],
    ) -> BitAssignment:
        rows = [
            Assigned(member.name, tuple(site.name for site in member.sites), self._choices[pick],
                     dict(zip(self._choices, losses, strict=True)))
            for member, pick, losses in zip(self._members, picks, estimates.losses, strict=True)
        ]
        widths = [width if isinstance(width, int) else None for width in (self._sim.weight_bits,
                                                                          self._sim.activation_bits)]
        return BitAssignment(
            UNITS[self._kind], limit, tuple(sorted(rows, key=lambda row: -row.losses[self._choices[0]])),
            tuple(measured), tuple((fixed + float(cost), float(loss)) for cost, loss in
                                   zip(best.costs, best.losses, strict=True)),
            self._config(picks), self._sim.config, (widths[0], widths[1]), self._loss is not None)
