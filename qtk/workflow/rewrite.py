"""Applies a transform to a simulation: without its quantizers, then planned again, with all that it did not touch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, TypeAlias

from torch import Tensor

from qtk.capture.calls import Call
from qtk.capture.inputs import ExampleInputs, split_inputs
from qtk.capture.prepared_model import PreparedModel
from qtk.core.plan import QuantPlan, SitePlan
from qtk.core.site import Site
from qtk.errors import CalibrationError
from qtk.graph.insert import QUANTIZERS, drop_sites, insert, remove
from qtk.graph.simulation import Simulation
from qtk.quantizers.quantizer import Mode, Quantizer
from qtk.transforms.members import Members
from qtk.transforms.result import TransformResult
from qtk.transforms.snapshot import unchanged_on_error
from qtk.transforms.steps import steps_of

LISTED = 5
"""Sites that an error lists."""

Transform: TypeAlias = Callable[[PreparedModel, Call], TransformResult]
"""Rewrites a prepared model without quantizers, proved on example inputs."""


class Rewritable(Protocol):
    """A simulation whose model may be rewritten, as ``QuantSim``."""

    example_inputs: ExampleInputs
    simulation: Simulation

    @property
    def model(self) -> PreparedModel: ...

    def plan_of(self, prepared: PreparedModel) -> QuantPlan: ...


def rewrite_simulation(sim: Rewritable, transform: Transform) -> TransformResult:
    """Applies ``transform`` to the float model of ``sim`` and plans it again.

    Encodings of values and parameters that the transform changed are forgotten, all others kept. An exception leaves
    ``sim`` as it was.

    Raises: CalibrationError if the transform changes a parameter or value whose encoding is frozen.
    """
    model, before = sim.model, sim.simulation
    with unchanged_on_error(model):
        remove(model)
        masked = {site: before.plan.unquantized[site] for site in sim.plan_of(model) if site not in before.plan}
        steps, tensors = len(steps_of(model)), _float_tensors(model)
        result = transform(model, Call(*split_inputs(sim.example_inputs), None))
        changed = {*result.sites, *_changed_parameters(tensors, _float_tensors(model))}
        rewritten = len(steps_of(model)) > steps
        plan = sim.plan_of(model) if rewritten else before.plan
        kept = {site: before.quantizers[site] for site in before.plan if _stays(site, before.plan, plan, changed)}
        _check_frozen(before, kept)
        simulation = Simulation(model, plan, insert(model, plan, known=kept))
        if still_masked := {site: why for site, why in masked.items() if site in plan}:
            simulation = drop_sites(simulation, still_masked)
        for site, quantizer in simulation.quantizers.items():
            if site not in kept:
                quantizer.mode = Mode.SIMULATE
    sim.simulation = simulation
    return result


def _stays(site: Site, before: QuantPlan, after: QuantPlan, changed: set[Site]) -> bool:
    """Whether the quantizer of a site serves it, and all that share it, as before."""
    leader = before[site].leader or site
    members = [other for other in before if (before[other].leader or other) == leader]
    return all(
        other in after and _same(before[other], after[other]) and other not in changed for other in members
    ) and sum((decided.leader or other) == leader for other, decided in after.items()) == len(members)


def _same(before: SitePlan, after: SitePlan) -> bool:
    return replace(before, reason="") == replace(after, reason="")


def _check_frozen(before: Simulation, kept: dict[Site, Quantizer]) -> None:
    """Raises: CalibrationError if the encoding of a site that is not kept is frozen, or its weight was rounded."""
    frozen = [site.name for site, quantizer in before.quantizers.items() if quantizer.frozen and site not in kept]
    if frozen:
        more = f" and {len(frozen) - LISTED} more" if len(frozen) > LISTED else ""
        raise CalibrationError(
            f"the encodings of {', '.join(frozen[:LISTED])}{more} are frozen, and belong to what would be rewritten; "
            "transform before layer-wise methods and before freezing, or sim.unfreeze() them"
        )


def _float_tensors(model: PreparedModel) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in Members(model).tensors().items() if QUANTIZERS not in name.split(".")}


def _changed_parameters(before: dict[str, Tensor], after: dict[str, Tensor]) -> list[Site]:
    return [Site.parameter(name) for name, tensor in before.items() if after.get(name) is not tensor]
