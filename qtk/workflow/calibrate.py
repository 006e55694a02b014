"""Gives every quantizer of a plan its encoding: parameters from their values, activations from data in one pass."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from qtk.calibrators.scheme import SCHEMES
from qtk.core.encoding import Encoding
from qtk.core.plan import QuantPlan, SitePlan
from qtk.core.site import Site
from qtk.core.spec import QuantSpec
from qtk.errors import CalibrationError
from qtk.graph.insert import drop_sites
from qtk.graph.static_values import static_values
from qtk.numerics.ranges import choose_range
from qtk.quantizers.modes import in_mode
from qtk.quantizers.quantizer import Mode, Quantizer
from qtk.workflow.feed import Data, Forward, run_all


def calibrate(
    model: nn.Module,
    plan: QuantPlan,
    quantizers: Mapping[str, Quantizer],
    data: Data | None,
    *,
    forward: Forward | None = None,
    num_batches: int | None = None,
    progress: bool = True,
) -> QuantPlan:
    """Computes the encodings of all sites that are not frozen, then loads them all at once.

    The model runs in float while activations are observed. A site that carried mask sentinels (−inf and the like)
    cannot be quantized without unmasking: its quantizer is taken out of ``model`` and of the plan.

    Changes ``model``. Returns: the plan as it now holds.

    Raises: CalibrationError naming site and batch for NaN or +inf, if there is no data, or a site saw none; nothing
        has changed then.
    """
    leaders = {site: decided for site, decided in plan.items() if decided.leader is None}
    pending = {site: decided for site, decided in leaders.items() if not quantizers[site.name].frozen}
    device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    encodings = {site: known_encoding(d.spec, d.range, device) for site, d in pending.items() if d.range is not None}
    encodings |= _from_parameters(model, {s: d for s, d in pending.items() if d.static})
    observed = {site: decided for site, decided in pending.items() if not decided.static and decided.range is None}
    masked: dict[Site, str] = {}
    if observed:
        if data is None:
            names = ", ".join(site.name for site in list(observed)[:3])
            raise CalibrationError(
                f"{len(observed)} activation sites need calibration data, the first of them {names}; "
                "pass batches, or make a weight-only sim with activation_bits=None"
            )
        seen, masked = _from_data(model, observed, quantizers, data, forward, num_batches, progress)
        encodings |= seen
    for site, encoding in encodings.items():
        quantizers[site.name].load_encoding(encoding)
    return drop_sites(model, plan, masked) if masked else plan


def known_encoding(spec: QuantSpec, bounds: tuple[float, float], device: torch.device) -> Encoding:
    """The encoding of a value whose real bounds are known beforehand; per tensor."""
    low, high = (torch.tensor([bound], device=device) for bound in bounds)
    return Encoding(spec, *choose_range(low, high, spec))


def _from_parameters(model: nn.Module, sites: Mapping[Site, SitePlan]) -> dict[Site, Encoding]:
    """Encodings of values made from parameters alone; each is observed once, as it is now."""
    encodings = {}
    for site, value in static_values(model, sites):
        decided = sites[site]
        scheme = SCHEMES[decided.method]
        observer = scheme.observer(decided.spec.granularity)
        try:
            observer.observe(value)
            encodings[site] = scheme.encoding(observer, decided.spec)
        except CalibrationError as error:
            raise CalibrationError(f"{site}: {error}") from None
    return encodings


def _from_data(
    model: nn.Module,
    sites: Mapping[Site, SitePlan],
    quantizers: Mapping[str, Quantizer],
    data: Data,
    forward: Forward | None,
    num_batches: int | None,
    progress: bool,
) -> tuple[dict[Site, Encoding], dict[Site, str]]:
    watched = {site: quantizers[site.name] for site in sites}
    try:
        for site, quantizer in watched.items():
            quantizer.observer = SCHEMES[sites[site].method].observer(sites[site].spec.granularity)
        with in_mode(quantizers.values(), Mode.BYPASS), in_mode(watched.values(), Mode.OBSERVE):
            run_all(model, data, forward=forward, num_batches=num_batches, label="calibrating", progress=progress)
        encodings, masked, starved = {}, {}, []
        for site, quantizer in watched.items():
            observer = quantizer.observer
            assert observer is not None
            if observer.sentinels:
                total = observer.count + observer.sentinels
                masked[site] = f"carries a mask: {observer.sentinels} of {total} values are sentinels ≤ -1e30"
            elif observer.count == 0:
                starved.append(site.name)
            else:
                encodings[site] = SCHEMES[sites[site].method].encoding(observer, sites[site].spec)
        if starved:
            raise CalibrationError(
                f"no data reached {len(starved)} sites: {', '.join(starved[:5])}; calibrate with data that runs "
                "them, or set them to float in the config"
            )
        return encodings, masked
    finally:
        for quantizer in watched.values():
            quantizer.observer = None

