"""Gives every quantizer of a plan its encoding: parameters from their values, activations from data in one pass."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import nn
from tqdm import tqdm

from qtk.calibrators.min_max import MinMax
from qtk.calibrators.scheme import calibrator
from qtk.core.encoding import Encoding
from qtk.core.plan import QuantPlan, SitePlan
from qtk.core.site import Site
from qtk.core.spec import PER_TENSOR, QuantSpec
from qtk.errors import CalibrationError
from qtk.graph.insert import drop_sites
from qtk.graph.static_values import static_values
from qtk.nn.device import device_of
from qtk.numerics.ranges import choose_range
from qtk.observers.observer import Observer
from qtk.observers.ranks import joined
from qtk.planning.selection import leaders
from qtk.quantizers.modes import in_mode
from qtk.quantizers.quantizer import Mode, Quantizer
from qtk.workflow.feed import Batch, Data, Forward, run_all


def calibrate(
    model: nn.Module,
    plan: QuantPlan,
    quantizers: Mapping[str, Quantizer],
    data: Data | None,
    *,
    example: Batch | None = None,
    sites: Iterable[str] | str | None = None,
    only_missing: bool = False,
    forward: Forward | None = None,
    num_batches: int | None = None,
    progress: bool = True,
) -> QuantPlan:
    """Computes the encodings of all sites that are not frozen, or of the named ones, then loads them all at once.

    The model runs in float while activations are observed. A site that carried mask sentinels (−inf and the like)
    cannot be quantized without unmasking: its quantizer is taken out of ``model`` and of the plan. Sites that take
    their ranges at run time need no data; for sentinels they are watched on the data, or without on ``example``. Where
    a process group is initialized, every rank observes its own data and all get the same encodings. ``sites`` are names
    or globs; ``only_missing`` leaves the encodings that there are.

    Changes ``model``. Returns: the plan as it now holds.

    Raises: CalibrationError naming the site, and on the CPU the batch, for NaN or +inf, for a name of no site, if there
        is no data, or a site saw none; nothing has changed then.
    """
    pending = {
        site: plan[site] for site in leaders(plan, sites)
        if not quantizers[site.name].frozen and not (only_missing and quantizers[site.name].scale is not None)
    }
    device = device_of(model)
    encodings = {site: known_encoding(d.spec, d.range, device) for site, d in pending.items() if d.range is not None}
    encodings |= parameter_encodings(model, {s: d for s, d in pending.items() if d.static}, progress)
    observed = {
        site: decided for site, decided in pending.items()
        if not decided.static and decided.range is None and not (decided.spec.dynamic and data is None)
    }
    masked: dict[Site, str] = {}
    if observed:
        seen = _from_data(model, observed, quantizers, data, forward, num_batches, progress)
        found, masked = _decided(observed, seen)
        encodings |= found
    if data is None and example is not None:
        masked |= _masked_in(model, {s: d for s, d in pending.items() if d.spec.dynamic}, quantizers, example)
    for site, encoding in encodings.items():
        bounds = plan[site].bounds
        quantizers[site.name].load_encoding(encoding if bounds is None else bounded(encoding, bounds))
    return drop_sites(model, plan, masked) if masked else plan


def known_encoding(spec: QuantSpec, bounds: tuple[float, float], device: torch.device) -> Encoding:
    """The encoding of a value whose real bounds are known beforehand; per tensor."""
    low, high = (torch.tensor([bound], device=device) for bound in bounds)
    return Encoding(spec, *choose_range(low, high, spec))


def bounded(encoding: Encoding, bounds: tuple[float | None, float | None]) -> Encoding:
    """The encoding with its range inside the bounds; half a step beyond is the rounding of the zero point."""
    low, high = encoding.minimum, encoding.maximum
    slack = encoding.scale / 2
    lower, upper = (-math.inf if bounds[0] is None else bounds[0]), (math.inf if bounds[1] is None else bounds[1])
    if not bool(((low < lower - slack) | (high > upper + slack)).any()):
        return encoding
    low, high = low.clamp(min=lower), high.clamp(max=upper)
    return Encoding(encoding.spec, *choose_range(torch.minimum(low, high), torch.maximum(low, high), encoding.spec))


def parameter_encodings(model: nn.Module, sites: Mapping[Site, SitePlan], progress: bool) -> dict[Site, Encoding]:
    """Encodings of values made from parameters alone; each is observed once, as it is now."""
    encodings = {}
    values = tqdm(
        static_values(model, sites), desc="weights", total=len(sites), unit="site", leave=False,
        disable=not progress or not sites,
    )
    for site, value in values:
        decided = sites[site]
        scheme = calibrator(decided.scheme)
        observer = scheme.observer(decided.spec.granularity, static=True)
        try:
            observer.observe(value)
            observer.check()
            (encodings[site],) = scheme.encodings([observer], [decided.spec])
        except CalibrationError as error:
            raise CalibrationError(f"{site}: {error}") from None
    return encodings


def _from_data(
    model: nn.Module,
    sites: Mapping[Site, SitePlan],
    quantizers: Mapping[str, Quantizer],
    data: Data | None,
    forward: Forward | None,
    num_batches: int | None,
    progress: bool,
) -> Mapping[str, Observer]:
    """What was seen at every site, by all ranks."""
    watched = {site.name: quantizers[site.name] for site in sites}
    problem: Exception | None = None
    try:
        for site, decided in sites.items():
            watched[site.name].observer = _observer(decided)
        try:
            if data is None:
                names = ", ".join(site.name for site in list(sites)[:3])
                raise CalibrationError(
                    f"{len(sites)} activation sites need calibration data, the first of them {names}; "
                    "pass batches, or make a weight-only sim with activation_bits=None"
                )
            with in_mode(quantizers.values(), Mode.BYPASS), in_mode(watched.values(), Mode.OBSERVE):
                run_all(model, data, forward=forward, num_batches=num_batches, label="calibrating", progress=progress)
        except Exception as error:  # the other ranks are waiting
            problem = error
        observers = {name: q.observer for name, q in watched.items() if q.observer is not None}
        return joined(observers, device_of(model), problem)
    finally:
        for quantizer in watched.values():
            quantizer.observer = None


def _masked_in(
    model: nn.Module, sites: Mapping[Site, SitePlan], quantizers: Mapping[str, Quantizer], example: Batch
) -> dict[Site, str]:
    """Which of the sites carry a mask in ``example``; whose other numbers mean nothing, and may be none."""
    watched = {site.name: quantizers[site.name] for site in sites}
    try:
        for quantizer in watched.values():
            quantizer.observer = MinMax().observer(PER_TENSOR)
        with in_mode(quantizers.values(), Mode.BYPASS), in_mode(watched.values(), Mode.OBSERVE):
            run_all(model, [example] if watched else [])
        return _decided(sites, {name: q.observer for name, q in watched.items() if q.observer is not None})[1]
    except CalibrationError:
        return {}
    finally:
        for quantizer in watched.values():
            quantizer.observer = None


def _observer(decided: SitePlan) -> Observer:
    if decided.spec.dynamic:
        return MinMax().observer(PER_TENSOR)
    return calibrator(decided.scheme).observer(decided.spec.granularity)


def _decided(
    sites: Mapping[Site, SitePlan], observers: Mapping[str, Observer]
) -> tuple[dict[Site, Encoding], dict[Site, str]]:
    """Encodings of what was observed, those of one scheme all at once, and why other sites cannot have one."""
    masked: dict[Site, str] = {}
    ready: dict[str, list[Site]] = {}
    starved = []
    for site, decided in sites.items():
        observer = observers[site.name]
        try:
            observer.check()
        except CalibrationError as error:
            raise CalibrationError(f"{site}: {error}") from None
        if observer.sentinels:
            total = observer.count + observer.sentinels
            masked[site] = f"carries a mask: {observer.sentinels} of {total} values are sentinels ≤ -1e30"
        elif observer.count == 0 and not decided.spec.dynamic:
            starved.append(site.name)
        elif not decided.spec.dynamic:
            ready.setdefault(decided.scheme, []).append(site)
    if starved:
        raise CalibrationError(
            f"no data reached {len(starved)} sites: {', '.join(starved[:5])}; calibrate with data that runs "
            "them, or set them to float in the config"
        )
    encodings: dict[Site, Encoding] = {}
    for scheme, members in ready.items():
        found = calibrator(scheme).encodings(
            [observers[site.name] for site in members], [sites[site].spec for site in members]
        )
        encodings |= dict(zip(members, found, strict=True))
    return encodings, masked
