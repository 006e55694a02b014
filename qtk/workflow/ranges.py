"""Changes encodings by hand: ``set_range``, ``freeze``, ``forget``."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from qtk.core.encoding import Encoding
from qtk.core.granularity import PerTensor
from qtk.core.plan import leaders
from qtk.core.site import Site
from qtk.errors import CalibrationError
from qtk.graph.simulation import Simulation
from qtk.nn.device import device_of
from qtk.numerics.ranges import choose_range
from qtk.training.learned_ranges import fix_ranges


def set_range(simulation: Simulation, names: str, low: float, high: float) -> None:
    """Sets the range of a site, or of all sites that match a glob, to [low, high], and freezes it.

    All scales of a site get the same range.

    >>> import qtk
    >>> sim = qtk.QuantSim(torch.nn.ReLU(), torch.randn(8, 4))
    >>> sim.set_range("relu:out", 0.0, 6.0)

    Raises: CalibrationError if there is no such site, a bound is not finite, low ≥ high, a site is quantized
        dynamically, or has several scales whose number is not known yet. Nothing has changed then.
    """
    if not low < high:
        raise CalibrationError(f"a range must be low < high, got [{low}, {high}]")
    encodings: dict[Site, Encoding] = {}
    for site in leaders(simulation.plan, names):
        spec, scale = simulation.plan[site].spec, simulation.quantizers[site].scale
        if spec.dynamic:
            raise CalibrationError(f"{site} is quantized dynamically: each tensor has a range of its own at run time; "
                                   "plan it without dynamic, or name other sites")
        if scale is None and not isinstance(spec.granularity, PerTensor):
            raise CalibrationError(f"{site} is {spec.granularity}, the number of its scales is not known yet; "
                                   "run sim.compute_encodings(data) first")
        like = torch.empty(1, device=device_of(simulation.model)) if scale is None else scale.detach()
        scale_and_zero_point = choose_range(torch.full_like(like, float(low)), torch.full_like(like, float(high)), spec)
        encodings[site] = Encoding(spec, *scale_and_zero_point)
    for site, encoding in encodings.items():
        quantizer = simulation.quantizers[site]
        quantizer.frozen = False
        quantizer.load_encoding(encoding)
        quantizer.frozen = True


def freeze(simulation: Simulation, names: Iterable[str] | str | None, *, frozen: bool) -> None:
    """Keeps encodings from changing, or lets them change again.

    Learned ranges that are frozen become fixed ones.

    Raises: CalibrationError if there is no such site; EncodingError naming a site whose learned scale is not positive
        and finite. Nothing has changed then.
    """
    sites = leaders(simulation.plan, names)
    if frozen:
        fix_ranges(simulation, [site.name for site in sites])
    for site in sites:
        simulation.quantizers[site].frozen = frozen


def forget(simulation: Simulation, names: Iterable[str] | str | None) -> None:
    """Deletes encodings, e.g. of changed weights; ``compute_encodings(data, only_missing=True)`` computes new ones.

    >>> import qtk
    >>> sim = qtk.QuantSim(torch.nn.Linear(4, 2).eval(), torch.randn(8, 4))
    >>> sim.compute_encodings([torch.randn(8, 4)], progress=False)
    >>> sim.forget("*weight")

    Raises: CalibrationError if there is no such site; EncodingError if an encoding is frozen.
    """
    quantizers = [simulation.quantizers[site] for site in leaders(simulation.plan, names)]
    for quantizer in quantizers:
        quantizer.refuse_if_frozen()
    for quantizer in quantizers:
        quantizer.drop_encoding()
