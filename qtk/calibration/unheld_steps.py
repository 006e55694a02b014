"""Finds layers of recurrent nets, dynamically quantized inside, whose input one range of 8 bits does not hold."""

from __future__ import annotations

from qtk.calibration.site_samples import SiteSamples
from qtk.config.schema import QuantConfig, Rule
from qtk.graph.dynamic_steps import dynamic_steps
from qtk.graph.simulation import Simulation
from qtk.planning.recurrent_profiles import float_step


def unheld_steps(samples: SiteSamples, simulation: Simulation) -> list[Rule]:
    """For each such layer, in each direction, the rule that computes it in float."""
    plan = simulation.plan
    return [
        float_step(path) for path, sites in dynamic_steps(simulation).items()
        if not all(samples.is_held_at_run_time(site, plan[site].spec.dtype.bits) for site in sites)
    ]


def with_float_steps(config: QuantConfig, rules: list[Rule]) -> QuantConfig:
    """``config`` with rules for layers behind the last one that says ``dynamic`` of nets without a path.

    A rule with a path, and any later one, outranks them. A config without such a rule stays as it is.
    """
    said = [index for index, rule in enumerate(config.rules) if rule.inside == "dynamic" and not rule.match.path]
    if not said:
        return config
    place = said[-1] + 1
    return config.model_copy(update={"rules": (*config.rules[:place], *rules, *config.rules[place:])})
