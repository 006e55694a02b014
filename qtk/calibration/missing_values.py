"""Says which settings keep NaN that marks missing values, where a calibration meets it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from qtk.core.site import Site
from qtk.errors import CalibrationError
from qtk.graph.simulation import Simulation


@contextmanager
def missing_values_told(simulation: Simulation, front: Sequence[Site]) -> Iterator[None]:
    """Adds to an error for values in front of all layers which setting keeps NaN in them."""
    try:
        yield
    except CalibrationError as error:
        plan, named = simulation.plan, {site for site in simulation.plan if f" {site.name}: " in str(error)}
        sharing = [site for site in front if named & {site, plan[site].leader}]
        inside = [f"{{match: {{path: {site.name.partition(':')[0]}}}, output: float}}" for site in sharing
                  if site.port != "input"]
        settings = ["io: {inputs: float}"] if len(inside) < len(sharing) else []
        settings += [f"rules: [{', '.join(inside)}]"] if inside else []
        if settings:
            raise CalibrationError(f"{error}; if NaN marks what is missing, {' and '.join(settings)}") from None
        raise
