"""``Simulation``: a model with quantizers on the sites of its plan, the argument of every workflow function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import nn

from qtk.core.plan import QuantPlan
from qtk.core.site import Site
from qtk.quantizers.quantizer import Quantizer


@dataclass(frozen=True, slots=True, eq=False)
class Simulation:
    """A prepared model with its plan and the quantizers that ``insert`` added.

    Args:
        model: a prepared model with its quantizers inserted.
        plan: what is quantized, and how.
        quantizers: site → its quantizer, in plan order; sites that share an encoding share the quantizer.
        dropped: the sites that calibration took out of the plan, each with the reason: values that carry a mask, and
            large arguments of exponentials.
        target: the name of the target whose rules exported files are to keep.
    """

    model: nn.Module
    plan: QuantPlan
    quantizers: Mapping[Site, Quantizer]
    dropped: Mapping[Site, str] = field(default_factory=dict)
    target: str | None = None


class HasSimulation(Protocol):
    """Anything that holds a simulation, as ``QuantSim`` does."""

    @property
    def simulation(self) -> Simulation: ...
