"""Gives sites that an earlier calibration took out of the plan another chance."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from qtk.graph.insert import drop_sites, insert, remove
from qtk.graph.simulation import Simulation
from qtk.quantizers.quantizer import Mode
from qtk.workflow.rewrite import Rewritable


@contextmanager
def dropped_sites_back(sim: Rewritable) -> Iterator[None]:
    """Plans the sites again that an earlier calibration dropped; an exception takes them out again."""
    before, model = sim.simulation, sim.model
    remove(model)
    plan = sim.plan_of(model)
    sim.simulation = Simulation(model, plan, insert(model, plan, known=before.quantizers), target=before.target)
    for site, quantizer in sim.simulation.quantizers.items():
        if site not in before.quantizers:
            quantizer.mode = Mode.SIMULATE
    try:
        yield
    except BaseException:
        sim.simulation = drop_sites(sim.simulation, before.dropped)
        raise
