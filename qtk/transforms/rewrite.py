"""Rewrites a simulation: without its quantizers, then planned again, with all that a change does not touch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol, TypeAlias

from torch import Tensor

from qtk.calls.calls import Call
from qtk.capture.prepared_model import PreparedModel
from qtk.config.schema import QuantConfig
from qtk.core.plan import QuantPlan, SitePlan
from qtk.core.site import Site
from qtk.errors import CalibrationError, CaptureError
from qtk.graph.insert import QUANTIZERS, drop_sites, insert, remove
from qtk.graph.simulation import HasSimulation, Simulation
from qtk.quantizers.quantizer import Mode
from qtk.transforms.keep_batch_norms import is_kept
from qtk.transforms.named_tensors import NamedTensors
from qtk.transforms.result import TransformResult
from qtk.transforms.snapshot import unchanged_on_error
from qtk.transforms.steps import steps_of

LISTED = 5
"""Sites that an error lists."""

Transform: TypeAlias = Callable[[PreparedModel, Call], TransformResult]
"""Rewrites a prepared model without quantizers, proved on example inputs."""


class Rewritable(Protocol):
    """A simulation whose model may be rewritten, as ``QuantSim``."""

    simulation: Simulation

    @property
    def model(self) -> PreparedModel: ...

    def plan_of(self, prepared: PreparedModel) -> QuantPlan: ...


class Configurable(Rewritable, Protocol):
    """A simulation that can be planned by another config, as ``QuantSim``."""

    config: QuantConfig


def refuse_kept(sim: HasSimulation) -> None:
    """Raises: CalibrationError if batch norms are kept until the export."""
    if is_kept(sim.simulation.model):
        raise CalibrationError("weights in front of live batch norms are computed at every step, and cannot be set; "
                               "run qtk.fold_batch_norms(sim) first")


def with_example(prepared: object, verb: str) -> tuple[PreparedModel, Call]:
    """A prepared model and the call it was captured with. Raises: CaptureError if it is none, or was only traced."""
    if not isinstance(prepared, PreparedModel):
        raise CaptureError(f"{verb} takes a prepared model or a QuantSim, got {type(prepared).__name__}; call "
                           "prepare_model(model, example_inputs) first")
    if prepared.example is None:
        raise CaptureError("the model was traced without inputs; pass example_inputs to prepare_model")
    return prepared, prepared.example


def rewrite_simulation(sim: Rewritable, transform: Transform) -> TransformResult:
    """Applies ``transform`` to the float model of ``sim`` and plans it again.

    Encodings of values and parameters that the transform changed are forgotten, all others kept. An exception leaves
    ``sim`` as it was.

    Raises: CalibrationError if the transform changes a value whose encoding is frozen, or a weight that was rounded.
    """
    model, before = sim.model, sim.simulation
    with unchanged_on_error(model):
        remove(model)
        steps, tensors = len(steps_of(model)), _float_tensors(model)
        assert model.example is not None, "a simulation is made of a complete capture"
        result = transform(model, model.example)
        changed = {*result.sites, *_changed_parameters(tensors, _float_tensors(model))}
        rewritten = len(steps_of(model)) > steps
        plan = sim.plan_of(model) if rewritten else before.plan
        simulation = _inserted(model, plan, before, changed)
    sim.simulation = simulation
    return result


def replan_simulation(sim: Configurable, config: QuantConfig) -> None:
    """Plans the model of ``sim`` again, by the rules of another config; what both plans have in common stays.

    Only the rules act: batch norms are folded, and modules excluded, when a simulation is made. An exception leaves
    ``sim`` as it was.

    Raises: CalibrationError if the encoding of a site that would change is frozen, or its weight was rounded; SpecError
        and ConfigError as ``QuantSim``.
    """
    model, before, config_before = sim.model, sim.simulation, sim.config
    try:
        with unchanged_on_error(model):
            remove(model)
            vars(sim).update(config=config)
            plan = sim.plan_of(model)
            simulation = _inserted(model, plan, before, set())
    except BaseException:
        vars(sim).update(config=config_before)
        raise
    sim.simulation = simulation


def _inserted(model: PreparedModel, plan: QuantPlan, before: Simulation, changed: set[Site]) -> Simulation:
    """The simulation of another plan, with the quantizers that serve the same sites in the same way as before.

    Raises: CalibrationError if another one is fixed.
    """
    kept = {site: before.quantizers[site] for site in _staying(before.plan, plan, changed)}
    refuse_fixed(before, [site for site in before.quantizers if site not in kept])
    simulation = Simulation(model, plan, insert(model, plan, known=kept), before.dropped, before.target)
    if still_masked := {site: why for site, why in before.dropped.items() if site in plan}:
        simulation = drop_sites(simulation, still_masked)
    for site, quantizer in simulation.quantizers.items():
        if site not in kept:
            quantizer.mode = Mode.SIMULATE
    return simulation


def refuse_fixed(simulation: Simulation, sites: Iterable[Site]) -> None:
    """Raises: CalibrationError if an encoding of ``sites`` is frozen, or a layer-wise method rounded the weight."""
    fixed = [
        site.name for site in sites
        if (quantizer := simulation.quantizers.get(site)) is not None and (quantizer.frozen or quantizer.rewrote_weight)
    ]
    if fixed:
        more = f" and {len(fixed) - LISTED} more" if len(fixed) > LISTED else ""
        raise CalibrationError(
            f"{', '.join(fixed[:LISTED])}{more} would be rewritten, but are frozen, or their weights were rounded; "
            "transform before layer-wise methods and before freezing, or sim.unfreeze() what is frozen alone"
        )


def _staying(before: QuantPlan, after: QuantPlan, changed: set[Site]) -> list[Site]:
    """The sites whose quantizer serves them, and all that share it, as before."""
    shared, shared_after = _members(before), _members(after)
    return [
        site for site, decided in before.items()
        if shared[leader := decided.leader or site] == shared_after.get(leader)
        and all(_same(before[other], after[other]) and other not in changed for other in shared[leader])
    ]


def _members(plan: QuantPlan) -> dict[Site, list[Site]]:
    """Each quantizer's leading site → all sites that it serves."""
    members: dict[Site, list[Site]] = {}
    for site, decided in plan.items():
        members.setdefault(decided.leader or site, []).append(site)
    return members


def _same(before: SitePlan, after: SitePlan) -> bool:
    return replace(before, reason="") == replace(after, reason="")


def _float_tensors(model: PreparedModel) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in NamedTensors(model).tensors().items() if QUANTIZERS not in name.split(".")}


def _changed_parameters(before: dict[str, Tensor], after: dict[str, Tensor]) -> list[Site]:
    return [Site.parameter(name) for name, tensor in before.items() if after.get(name) is not tensor]
