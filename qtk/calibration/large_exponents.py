"""Which sites hold arguments of exponentials in steps that change the results of these too much."""

from __future__ import annotations

from qtk.calibration.width_check import LargeStep
from qtk.core.site import Site
from qtk.graph.exponents import exponent_sites
from qtk.graph.simulation import Simulation

LARGEST_STEP = 1 / 16
"""Above it the result of an exponential is less than 35 dB above its error: a step s leaves 20 log10(√12 / s) dB."""

REASON = "only an exponential reads it, or what is computed from it, and steps are large for its argument"


def large_exponents(simulation: Simulation) -> dict[Site, LargeStep]:
    """The calibrated sites that serve such values alone, in plan order.

    A value that is only multiplied or added up to such an argument is one, whatever its own step.
    """
    quantizers = {site.name: quantizer for site, quantizer in simulation.quantizers.items()}

    def times(name: str) -> float:
        encoding = None if quantizers[name].frozen else quantizers[name].encoding
        return 0.0 if encoding is None else float(encoding.scale.max()) / LARGEST_STEP

    exponents = set(exponent_sites(simulation.model, lambda name: times(name) > 1))
    if not exponents:
        return {}
    others = {decided.leader for site, decided in simulation.plan.items() if site.name not in exponents}
    return {
        site: LargeStep(REASON, times(site.name))
        for site, decided in simulation.plan.items()
        if site.name in exponents and site not in others and decided.leader is None
    }
