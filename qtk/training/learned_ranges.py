"""Which sites learn their ranges, or let them follow their weights, and the parameters that are trained for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from torch import nn

from qtk.core.plan import leaders
from qtk.core.site import Site
from qtk.errors import CalibrationError, NotCalibratedError
from qtk.graph.simulation import Simulation
from qtk.ops.gradient_scale import GradientScale
from qtk.quantizers.quantizer import Quantizer
from qtk.training.gradient_reach import without_gradient
from qtk.training.stale_optimizers import watch_optimizers
from qtk.training.stale_wrappers import watch_wrappers

LISTED = 5
"""Sites that an error lists."""


def learn_ranges(
    simulation: Simulation, names: Iterable[str] | str, gradient_scale: Literal["lsq"] | None = "lsq"
) -> list[str]:
    """Makes ranges trainable, to be trained with the weights (LSQ, LSQ+).

    Changes the quantizers.

    >>> import qtk, torch
    >>> sim = qtk.QuantSim(torch.nn.Linear(4, 2).eval(), torch.randn(8, 4), weight_bits=4)
    >>> sim.compute_encodings([torch.randn(8, 4)], progress=False)
    >>> sim.learn_ranges()
    ['input:input', 'weight', 'linear:out']
    >>> optimizer = torch.optim.AdamW([
    ...     {"params": sim.weight_parameters()},
    ...     {"params": sim.range_parameters(), "lr": 1e-3, "weight_decay": 0.0},
    ... ])
    >>> sim.model(torch.randn(8, 4)).sum().backward()
    >>> optimizer.step()

    Scales and zero points are trained relative to where learning starts, so one learning rate suits all sites: 1e-3
    moves a scale by about 0.1 % a step of Adam. A symmetric site learns its scale only. The mode stays through
    ``compute_encodings``, which gives learning a new start, and is part of the ``state_dict``.

    Args:
        simulation: calibrated.
        names: names of sites, or globs over names. Dynamic and frozen sites are skipped, sites whose scales are
            stored in few bits, and sites of values that no gradient reaches, as before a ``detach``.
        gradient_scale: ``"lsq"``: gradients of ranges are divided by √(N · q_max), with N the elements of a sample that
            share a scale (arXiv 1902.08153); ``None``: they are not.

    Returns: the names of the sites whose ranges are learned now.

    Raises: CalibrationError if there is no such site, or none whose range can be learned; NotCalibratedError naming
        sites without an encoding. Nothing has changed then. EncodingError in the next step of an optimizer that was
        made before, in the next forward pass of a DistributedDataParallel that was, and in the forward pass after a
        scale has become 0, negative or not finite, on a GPU some steps later.
    """
    scaled = GradientScale.NONE if gradient_scale is None else GradientScale.LSQ
    without = without_gradient(simulation.model)
    others = {site: "is of a value that no gradient reaches" for site in leaders(simulation.plan)
              if simulation.quantizers[site] in without}
    taken = _taken(simulation, names, "be learned", others)
    made = {site.name: each for site in taken if not (each := simulation.quantizers[site]).learns_range}
    for site in taken:
        simulation.quantizers[site].learn_range(scaled)
    watch_wrappers(simulation.model, made)
    watch_optimizers(simulation.model, {site.name: simulation.quantizers[site] for site in taken})
    return [site.name for site in taken]


def fix_ranges(simulation: Simulation, names: Iterable[str] | str) -> list[str]:
    """Makes learned ranges fixed ones, zero points rounded to codes; returns the sites that were learned.

    >>> import qtk, torch
    >>> sim = qtk.QuantSim(torch.nn.Linear(4, 2).eval(), torch.randn(8, 4))
    >>> sim.compute_encodings([torch.randn(8, 4)], progress=False)
    >>> _ = sim.learn_ranges("weight")
    >>> sim.fix_ranges()
    ['weight']

    Raises: CalibrationError for a name of no site; EncodingError naming a site whose scale is not positive and finite.
        Nothing has changed then.
    """
    taken = [site for site in leaders(simulation.plan, names) if simulation.quantizers[site].learns_range]
    for site in taken:
        _ = simulation.quantizers[site].encoding  # raises before any has changed
    for site in taken:
        simulation.quantizers[site].fix_range()
    return [site.name for site in taken]


def track_weights(simulation: Simulation, names: Iterable[str] | str) -> list[str]:
    """Lets ranges of weights follow the weights' extremes in every forward pass in training mode.

    >>> import qtk, torch
    >>> sim = qtk.QuantSim(torch.nn.Linear(4, 2).eval(), torch.randn(8, 4))
    >>> sim.compute_encodings([torch.randn(8, 4)], progress=False)
    >>> sim.track_weights("weight")
    ['weight']

    Every pass sets them as the scheme ``min_max`` does; ``sim.freeze`` ends it. Changes the quantizers; learned ranges
    among them become fixed ones. Returns: the names of the sites taken; frozen ones are skipped.

    Raises: as ``learn_ranges``, and CalibrationError if no site is one of a parameter.
    """
    plan = simulation.plan
    others = {site: "is no parameter, its range needs data: sim.learn_ranges, or a QatSchedule that observes"
              for site in leaders(plan, names) if not plan[site].static}
    taken = _taken(simulation, names, "follow", others)
    fix_ranges(simulation, [site.name for site in taken])
    for site in taken:
        simulation.quantizers[site].momentum = 1.0
    return [site.name for site in taken]


def range_parameters(simulation: Simulation) -> list[nn.Parameter]:
    """Returns the parameters of learned ranges. Raises: CalibrationError if there are none."""
    parameters = list(_parameters(simulation))
    if not parameters:
        raise CalibrationError("no range is learned, so no range has parameters; run sim.learn_ranges() first")
    return parameters


def weight_parameters(simulation: Simulation) -> list[nn.Parameter]:
    """Returns the parameters of the model that are not parameters of learned ranges."""
    of_ranges = {id(parameter) for parameter in _parameters(simulation)}
    return [parameter for parameter in simulation.model.parameters() if id(parameter) not in of_ranges]


def _parameters(simulation: Simulation) -> Iterator[nn.Parameter]:
    for quantizer in dict.fromkeys(simulation.quantizers.values()):
        yield from quantizer.parameters(recurse=False)


def _taken(
    simulation: Simulation, names: Iterable[str] | str, what: str, others: Mapping[Site, str]
) -> list[Site]:
    """The selected sites that are not skipped. Raises: as ``learn_ranges``."""
    selected = {site: others.get(site) or _why_not(simulation.quantizers[site])
                for site in leaders(simulation.plan, [names] if isinstance(names, str) else list(names))}
    taken = [site for site, reason in selected.items() if reason is None]
    if not taken:
        reasons = "; ".join(f"{site} {reason}" for site, reason in list(selected.items())[:LISTED])
        raise CalibrationError(f"{names!r} selects no site whose range can {what}: {reasons or 'it is empty'}; "
                               "print(sim.plan) shows all sites")
    missing = [site.name for site in taken if simulation.quantizers[site].scale is None]
    if missing:
        raise NotCalibratedError(f"{len(missing)} of {len(taken)} sites have no range to start from, "
                                 f"{', '.join(missing[:LISTED])}; run sim.compute_encodings(data) first")
    return taken


def _why_not(quantizer: Quantizer) -> str | None:
    """Says why the range of a site cannot be trained; ``None`` if it can."""
    if quantizer.spec.dynamic:
        return "is quantized dynamically"
    if quantizer.frozen:
        return "is frozen: run sim.unfreeze() to let its range change"
    if quantizer.spec.scale_format is not None:
        return f"stores its scales as {quantizer.spec.scale_format.value}, which gradients would leave"
    return None
