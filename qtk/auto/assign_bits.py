"""Mixed precision: a width for each site, so that the outputs lose least under a budget."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from qtk.algorithms.frontier import Frontier, frontier
from qtk.auto.bit_assignment import Assigned, BitAssignment, Measured
from qtk.auto.matrix_products import MatrixProduct, matrix_products
from qtk.auto.site_rules import SiteRules
from qtk.auto.widths import (
    FLOAT_BITS,
    Choice,
    Costs,
    bit_operations,
    in_pairs,
    members,
    quantized_bytes,
    setting_of,
    single,
    weights_of,
)
from qtk.config.schema import QuantConfig
from qtk.core.dtypes import BITS
from qtk.errors import CalibrationError, ConfigError
from qtk.graph.footprint import footprint
from qtk.public import public
from qtk.quantizers.modes import in_mode
from qtk.quantizers.quantizer import Mode
from qtk.quantsim import QuantSim
from qtk.registry import nearest
from qtk.workflow.float_outputs import FloatOutputs
from qtk.workflow.forward_pass import Batch, Forward, in_memory, outputs, run_batch
from qtk.workflow.rewrite import refuse_kept, replan_simulation
from qtk.workflow.sensitivity import Loss, sensitivity
from qtk.workflow.valid_tokens import Valid

UNITS = {"bytes": "bytes of parameters", "weight_bits": "bits a weight, on average", "bit_operations": "bit operations"}
"""What a budget can count → in words."""

CHOICES: tuple[Choice, ...] = (4, 8, 16)


@public
def assign_bits(
    sim: QuantSim, data: Iterable[Batch], *, budget: Mapping[str, float],
    choices: Sequence[int | Literal["float"]] = CHOICES, loss: Loss | None = None, forward: Forward | None = None,
    num_batches: int | None = None, valid: Valid | None = None, progress: bool = True,
) -> BitAssignment:
    """Gives each site the width that lets the outputs lose least under a budget, and calibrates what changed.

    >>> import qtk, torch
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)).eval()
    >>> batches = [torch.randn(32, 16) for _ in range(4)]
    >>> sim = qtk.QuantSim(model, batches[0])
    >>> found = qtk.assign_bits(sim, batches, budget={"weight_bits": 6}, choices=(4, 8), progress=False)
    >>> {row.name: row.width for row in found.rows}
    {'0.weight': 4, '2.weight': 8}
    >>> found.save("/tmp/widths.yaml", force=True)  # doctest: +SKIP

    What each width costs the outputs is estimated for every site, by one backward pass a width (``sim.sensitivity``).
    Estimates are summed, and the best sum under the budget is found exactly (``qtk.algorithms.frontier``). The result
    is calibrated and measured beside equal widths everywhere; what really loses least is taken.

    Args:
        sim: the simulation; its plan, config and encodings change, its weights do not. Sites whose encodings are
            frozen or learned, or whose weights a layer-wise method has rounded, stay as they are: call this first.
        data: batches to calibrate and to measure with; kept in memory.
        budget: one limit. ``{"bytes": n}``: all parameters with their scales. ``{"weight_bits": n}``: the mean width of
            the elements of weights. ``{"bit_operations": n}``: Σ multiplications × width × width over matrix products
            and convolutions, for one call on the example inputs. The first two set widths of weights alone.
        choices: the widths that a site can have.
        loss: ``loss(outputs, batch)``, as for ``sim.sensitivity``; ``None``: the error of the outputs.
        forward: as for ``compute_encodings``.
        num_batches: as for ``compute_encodings``.
        valid: as for ``compute_encodings``.
        progress: show bars.

    Returns: the widths, what they cost and lose, and the config; printable, and written by its ``save``.

    Raises: CalibrationError for a budget below the least cost, saying what that is, or if no site can have a width of
        its own; ConfigError for an unknown budget or width; as ``compute_encodings`` and ``sensitivity``. Nothing has
        changed then.
    """
    kind, limit = _checked(budget)
    widths = _checked_choices(choices)
    refuse_kept(sim)
    batches = in_memory(data, num_batches)
    search = _Search(sim, batches, kind, widths, loss, forward, valid, progress)
    found = search.found(limit)
    search.apply(found.config)
    return found


def _checked(budget: Mapping[str, float]) -> tuple[str, float]:
    if len(budget) != 1:
        raise ConfigError(f"a budget is one limit, e.g. {{'bytes': 1e6}}, got {dict(budget)}; call again for another")
    (kind, limit), = budget.items()
    if kind not in UNITS:
        raise ConfigError(f"unknown budget {kind!r}; {nearest(kind, UNITS)}")
    if not math.isfinite(limit) or limit <= 0:
        raise ConfigError(f"the budget of {UNITS[kind]} must be a positive number, got {limit}")
    return kind, float(limit)


def _checked_choices(choices: Sequence[Choice]) -> tuple[Choice, ...]:
    for width in choices:
        if width != "float" and width not in BITS:
            raise ConfigError(f"a width is {BITS.start} to {BITS.stop - 1} bits or 'float', got {width!r}")
    rising = tuple(sorted(set(choices), key=_bits))
    if len(rising) < 2:
        raise ConfigError(f"choices must be two widths at least, got {list(choices)}")
    return rising


def _bits(width: Choice) -> int:
    return FLOAT_BITS if width == "float" else width


@dataclass(slots=True)
class _Estimates:
    """What is known of members by choice.

    ``losses``, ``sizes``: [members, choices], in the unit of the loss and in bytes; ``left``: bytes of all other
    parameters; ``elements``: of the weights of each member.
    """

    losses: list[list[float]]
    sizes: list[list[float]]
    left: float
    elements: list[int]


class _Search:
    """The search on a copy of the simulation, which alone changes."""

    def __init__(
        self, sim: QuantSim, batches: list[Batch], kind: str, choices: tuple[Choice, ...], loss: Loss | None,
        forward: Forward | None, valid: Valid | None, progress: bool,
    ) -> None:
        self._sim, self._batches, self._kind, self._choices = sim, batches, kind, choices
        self._loss, self._forward, self._valid, self._progress = loss, forward, valid, progress
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
        costs = self._costs(estimates)
        best = frontier(estimates.losses, costs.terms)
        index = best.within(limit - costs.fixed)
        if index is None:
            least = costs.fixed + float(best.costs[0])
            raise CalibrationError(f"the budget of {limit:,.6g} {UNITS[self._kind]} is below the least that "
                                   f"{list(self._choices)} can reach, {least:,.6g}; raise it, or add narrower choices")
        picks = [[int(pick) for pick in best.picks[index]]]
        picks += [[choice] * len(self._members) for choice in range(len(self._choices))]
        labels = ["assigned", *(f"all {'float' if w == 'float' else f'{w} bits'}" for w in self._choices)]
        measured = []
        for label, each in zip(labels, picks, strict=True):
            cost = costs.of(each)
            estimated = sum(losses[pick] for losses, pick in zip(estimates.losses, each, strict=True))
            measured.append(Measured(label, cost, self._measured(each), estimated, cost <= limit))
        taken = min((i for i, each in enumerate(measured) if each.fits), key=lambda i: measured[i].loss)
        return self._result(limit, best, costs.fixed, estimates, picks[taken],
                            [measured[taken], *(each for i, each in enumerate(measured) if i != taken)])

    def apply(self, config: QuantConfig) -> None:
        """Gives the simulation itself the plan and the encodings of the copy that was measured."""
        self._plan(config)
        replan_simulation(self._sim, config)
        for name, quantizer in self._sim.quantizers.items():
            encoding = self._trial.quantizers[name].encoding
            if quantizer.encoding is None and encoding is not None:
                quantizer.load_encoding(encoding)
        self._sim.check()

    def _plan(self, config: QuantConfig) -> None:
        replan_simulation(self._trial, config)
        self._trial.compute_encodings(self._batches, only_missing=True, forward=self._forward, valid=self._valid,
                                      progress=self._progress)

    def _config(self, picks: Sequence[int]) -> QuantConfig:
        """The simulation's config with a rule for each width."""
        config = self._sim.config
        for index, width in enumerate(self._choices):
            sites = [site for member, pick in zip(self._members, picks, strict=True) if pick == index
                     for site in member.sites]
            config = self._rules.joined(config, sites, setting_of(width))
        return config

    def _estimates(self) -> _Estimates:
        """Estimates for all members; those that no gradient reaches are dropped, and keep their width."""
        rows: list[dict[str, float]] = []
        sizes: list[list[float]] = []
        weights, left = weights_of(self._sim.simulation, self._members), 0.0
        for index, width in enumerate(self._choices):
            self._plan(self._config([index] * len(self._members)))
            simulation = self._trial.simulation
            if width == "float":
                rows.append({})
                sizes.append([float(sum(each.numel() * each.element_size() for each in of)) for of in weights])
                continue
            if self._kind == "bit_operations":
                self._products = matrix_products(
                    simulation, lambda: run_batch(self._trial.model, self._sim.example_inputs))
            found = sensitivity(simulation, self._batches, loss=self._loss, top=0, forward=self._forward,
                                progress=self._progress)
            rows.append({row.name: row.increase for row in found})
            sizes.append(quantized_bytes(simulation, self._members))
            left = footprint(self._trial.model).quantized_bytes - sum(sizes[-1])
        losses = [[sum(row.get(site.name, 0.0) for site in member.sites) for row in rows] for member in self._members]
        known = [index for index, each in enumerate(losses) if not any(map(math.isnan, each))]
        left += sum(sizes[-1][index] for index in range(len(losses)) if index not in known)
        self._members = [self._members[index] for index in known]
        return _Estimates([[max(0.0, loss) for loss in losses[index]] for index in known],
                          [[size[index] for size in sizes] for index in known], left,
                          [sum(each.numel() for each in weights[index]) for index in known])

    def _costs(self, estimates: _Estimates) -> Costs:
        """What an assignment costs in the unit of the budget."""
        if self._kind == "bytes":
            return single(estimates.sizes, estimates.left)
        if self._kind == "weight_bits":
            every = sum(estimates.elements)
            return single([[_bits(width) * count / every for width in self._choices] for count in estimates.elements],
                          0.0)
        return in_pairs(self._products, self._members, self._choices, self._sim.plan, bit_operations)

    def _measured(self, picks: Sequence[int]) -> float:
        """The loss of the copy with these widths, calibrated."""
        self._plan(self._config(picks))
        quantizers, model = list(self._trial.quantizers.values()), self._trial.model
        if self._loss is not None:
            made = outputs(model, self._batches, forward=self._forward)
            losses = [float(self._loss(output, batch)) for output, batch in zip(made, self._batches, strict=True)]
            return sum(losses) / len(losses)
        if self._float is None:
            with in_mode(quantizers, Mode.BYPASS):
                self._float = FloatOutputs(model, self._batches, self._forward)
        return self._float.error(model)

    def _result(
        self, limit: float, best: Frontier, fixed: float, estimates: _Estimates, picks: Sequence[int],
        measured: Sequence[Measured],
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
