"""Ranges by hand: set, kept from changing, or forgotten."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from qtk.core.encoding import Encoding
from qtk.core.granularity import PerTensor
from qtk.core.plan import QuantPlan
from qtk.errors import CalibrationError
from qtk.nn.device import device_of
from qtk.numerics.ranges import choose_range
from qtk.planning.selection import leaders
from qtk.quantizers.quantizer import Quantizer


def set_range(
    model: nn.Module, plan: QuantPlan, quantizers: Mapping[str, Quantizer], names: str, low: float, high: float
) -> None:
    """Gives the sites an encoding that just holds [low, high], and freezes them.

    All scales of a site get the same range.

    Raises: CalibrationError if there is no such site, the bounds are not finite and low < high, a site takes its range
        at run time, or has more than one scale and no shape of them yet. Nothing has changed then.
    """
    if not low < high:
        raise CalibrationError(f"a range must be low < high, got [{low}, {high}]")
    encodings: dict[str, Encoding] = {}
    for site in leaders(plan, names):
        spec, scale = plan[site].spec, quantizers[site.name].scale
        if spec.dynamic:
            raise CalibrationError(f"{site} takes its range from each tensor at run time; plan it without dynamic, or "
                                   "name other sites")
        if scale is None and not isinstance(spec.granularity, PerTensor):
            raise CalibrationError(f"{site} has a scale for each {spec.granularity}, how many is not known yet; "
                                   "run sim.compute_encodings(data) first")
        like = torch.empty(1, device=device_of(model)) if scale is None else scale.detach()
        chosen = choose_range(torch.full_like(like, float(low)), torch.full_like(like, float(high)), spec)
        encodings[site.name] = Encoding(spec, *chosen)
    for name, encoding in encodings.items():
        quantizers[name].frozen = False
        quantizers[name].load_encoding(encoding)
        quantizers[name].frozen = True


def freeze(
    plan: QuantPlan, quantizers: Mapping[str, Quantizer], names: Iterable[str] | str | None, *, frozen: bool
) -> None:
    """Keeps encodings from changing, or lets them change again. Raises: CalibrationError if there is no such site."""
    for site in leaders(plan, names):
        quantizers[site.name].frozen = frozen


def forget(plan: QuantPlan, quantizers: Mapping[str, Quantizer], names: Iterable[str] | str | None) -> None:
    """Drops encodings. Raises: CalibrationError if there is no such site; EncodingError if one is frozen."""
    chosen = leaders(plan, names)
    for site in chosen:
        quantizers[site.name].refuse_if_frozen()
    for site in chosen:
        quantizers[site.name].drop_encoding()
