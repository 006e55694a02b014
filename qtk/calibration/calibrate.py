"""Computes every encoding of a simulation: parameters from their values, activations from data in one pass."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from qtk.calibration.clamped_values import CLAMPS, Bounds, clamped_values
from qtk.calibration.large_exponents import large_exponents
from qtk.calibration.local_gradients import LocalGradients
from qtk.calibration.missing_values import missing_values_told
from qtk.calibration.reached_matrices import matrices_counted
from qtk.calibration.scale_floor import raise_scales
from qtk.calibration.site_samples import SiteSamples
from qtk.calibration.width_check import LargeStep
from qtk.calibrators.min_max import MinMax
from qtk.calibrators.scheme import calibrator
from qtk.config.load import precise_in
from qtk.core.encoding import HOST, Encoding, encodings_to
from qtk.core.needs import found_where
from qtk.core.plan import SitePlan, leaders
from qtk.core.site import Site
from qtk.core.spec import PER_TENSOR, QuantSpec
from qtk.data.forward_pass import Batch, Data, Forward, run_all
from qtk.data.valid_tokens import Valid, ValidTokens
from qtk.errors import CalibrationError
from qtk.graph.evaluate import static_values
from qtk.graph.graphs import contents_of
from qtk.graph.insert import drop_sites
from qtk.graph.masks import maskable_sites
from qtk.graph.simulation import Simulation
from qtk.nn.device import device_of, is_dry_run, without_values
from qtk.numerics.ranges import choose_range
from qtk.observers.extremes import ADVICE, on_cpu, settle
from qtk.observers.observer import Observer
from qtk.observers.ranks import exchanged, joined, several_ranks
from qtk.observers.weighted_histogram import WeightedHistogram
from qtk.operators.contents import Trait
from qtk.operators.op_row import Mask, Precision
from qtk.quantizers.modes import in_mode
from qtk.quantizers.quantizer import Mode, Quantizer

OF_MASKS = frozenset({Mask.READS, Mask.MAKES, Mask.KEEPS, Trait.COMPOSITES})
OF_EXPONENTS = frozenset({Precision.EXPONENT})
"""What graphs hold in which masks, and arguments of exponentials, can be."""

AT_ONCE = 1 << 26
"""Elements of parameters on an accelerator whose ranges are searched together."""
AT_ONCE_ON_CPU = 1 << 22
"""As many on the CPU: of small parameters the calls cost most, large ones are searched while they are in memory."""


@dataclass(frozen=True, slots=True, eq=False)
class CalibrationData:
    """Holds the data of a calibration.

    Args:
        batches: batches, or a function that runs the model over its own data; ``None`` if no activation is quantized
            statically. Of a model with ``states`` they are the steps of one sequence, or ``qtk.Sequences``.
        example: example inputs; without ``batches`` they show which dynamically quantized values carry a mask.
        forward: runs the model on a batch; ``None``: ``run_batch``.
        num_batches: largest number of batches; ``None``: all.
        progress: show progress bars.
        valid: which tokens count, where they can be followed: the name of an input (``"attention_mask"``), a list with
            the mask of each side of an encoder-decoder, or a function from a batch to bool [samples, tokens]; ``None``:
            all. A mapping from masks to the names of their inputs where names do not tell.
    """

    batches: Data | None
    example: Batch | None = None
    forward: Forward | None = None
    num_batches: int | None = None
    progress: bool = True
    valid: Valid | None = None


def calibrate(
    simulation: Simulation, sites: Mapping[Site, SitePlan], data: CalibrationData
) -> tuple[Simulation, SiteSamples]:
    """Computes the encodings of ``sites``, then loads them all at once.

    The model runs in float while activations are observed. A site that carried attention-mask sentinels (−inf and the
    like) cannot be quantized without unmasking: its quantizer is taken out of the model and of the plan. Where no mask
    can be (``qtk.graph.masks``) a few such numbers are an error. Large arguments of exponentials, and inputs in several
    units (``uneven_channels``), are taken out too, where the target computes in float what loses too much. Sites
    quantized dynamically need no data; they are only watched for sentinels. Scales of weights are raised where an int32
    bias needs it, see ``raise_scales``. Where a process group is initialized, every rank observes its own data and all
    get the same encodings.

    Args:
        simulation: its model is changed.
        sites: as ``sites_to_calibrate`` selects them.
        data: what activations are observed on.

    Returns: the simulation without the sites that are taken out; samples of what was observed.

    Raises: CalibrationError for NaN, infinity or sentinels that are no mask, naming the site and on the CPU the batch;
        if there is no data; or if no data reached a site. Nothing has changed then.
    """
    encodings = {site: known_encoding(d.spec, d.range) for site, d in sites.items() if d.range is not None}
    encodings = _on(device_of(simulation.model), encodings)
    static = {site: decided for site, decided in sites.items() if decided.static}
    contents = contents_of(simulation.model)
    maskable: set[Site] = found_where(OF_MASKS, contents, lambda: _maskable_leaders(simulation), set())
    encodings |= parameter_encodings(simulation.model, static, data.progress, maskable=maskable)
    sampled = {site: simulation.quantizers[site] for site, decided in sites.items() if not decided.static}
    tokens = None if data.valid is None else ValidTokens(simulation.model, data.valid)
    samples = SiteSamples(simulation, sampled, tokens)
    observers = _observed_on_data(simulation, sites, data, samples, tokens, contents, maskable)
    settle(observers.values())
    masked = _masked(observers) | {site: "a constant that carries a mask" for site in static if site not in encodings}
    seen = {
        site: sites[site] for site, observer in observers.items()
        if site not in masked and not _is_unseen(sites[site], observer)
    }
    for site, encoding in _encodings_of_observed(seen, observers).items():
        fixed = encodings.get(site)
        encodings[site] = encoding if fixed is None else filled(encoding, fixed, sites[site])
    if data.batches is None and data.example is not None:
        masked |= _masked_in_example(simulation, sites, data.example, maskable)
    clamped: dict[Site, Bounds] = found_where(CLAMPS, contents, lambda: clamped_values(simulation), {})
    for site, encoding in encodings.items():
        bounds = simulation.plan[site].bounds or clamped.get(site)
        if bounds is not None:
            encodings[site] = encoding = bounded(encoding, bounds)
        simulation.quantizers[site].load_encoding(encoding)
    if precise_in(simulation.target) == "float":
        large: dict[Site, LargeStep] = found_where(OF_EXPONENTS, contents, lambda: large_exponents(simulation), {})
        large |= samples.uneven_channels(simulation)
        for share in exchanged(large, None) if several_ranks() else [large]:  # a rank sees channels of its own data
            for site, found in share.items():
                masked |= dict.fromkeys((site, *found.constants), found.reason)
    simulation = drop_sites(simulation, masked) if masked else simulation
    if any(decided.factors for decided in simulation.plan.values()):
        raise_scales(simulation)
    return simulation, samples


def sites_to_calibrate(
    simulation: Simulation, names: Iterable[str] | str | None = None, *, only_missing: bool = False
) -> dict[Site, SitePlan]:
    """The leaders that are not frozen, all or the selection ``names``; ``only_missing``: without an encoding.

    Raises: CalibrationError for a name or glob that matches no site.
    """
    selected = {}
    for site in leaders(simulation.plan, names):
        quantizer = simulation.quantizers[site]
        if not quantizer.frozen and not (only_missing and quantizer.scale is not None):
            selected[site] = simulation.plan[site]
    return selected


def known_encoding(spec: QuantSpec, bounds: tuple[float, float]) -> Encoding:
    """The per-tensor encoding of a value whose bounds the config fixes (``range``), on the CPU."""
    low, high = (torch.tensor([bound], device=HOST) for bound in bounds)
    return Encoding(spec, *choose_range(low, high, spec))


def _on(device: torch.device, encodings: Mapping[Site, Encoding]) -> dict[Site, Encoding]:
    return dict(zip(encodings, encodings_to(list(encodings.values()), device), strict=True))


def bounded(encoding: Encoding, bounds: tuple[float | None, float | None]) -> Encoding:
    """The encoding with its range clamped to the bounds; half a scale beyond is allowed, for the zero point rounds."""
    low, high = encoding.minimum, encoding.maximum
    slack = encoding.scale / 2
    lower, upper = (-math.inf if bounds[0] is None else bounds[0]), (math.inf if bounds[1] is None else bounds[1])
    if not bool(((low < lower - slack) | (high > upper + slack)).any()):
        return encoding
    low, high = low.clamp(min=lower), high.clamp(max=upper)
    return Encoding(encoding.spec, *choose_range(torch.minimum(low, high), torch.maximum(low, high), encoding.spec))


def filled(calibrated: Encoding, fixed: Encoding, decided: SitePlan) -> Encoding:
    """The encoding of a fixed range, or the calibrated one within it if that fills too small a share of it."""
    assert decided.range is not None
    low, high = decided.range
    if bool((calibrated.maximum - calibrated.minimum >= decided.min_fill * (high - low)).any()):
        return fixed
    return bounded(calibrated, decided.range)


def parameter_encodings(
    model: nn.Module, sites: Mapping[Site, SitePlan], progress: bool, *, maskable: Collection[Site] = (),
) -> dict[Site, Encoding]:
    """Encodings of values computed from parameters alone, from their present values.

    Sites of ``maskable`` that carry a mask get none.

    Raises: CalibrationError naming the site, if a value cannot be calibrated, or holds −inf or the like; or if the
        model is on the meta device.
    """
    if is_dry_run(model):
        raise CalibrationError(without_values(model))
    encodings: dict[Site, Encoding] = {}
    waiting: dict[Site, Observer] = {}
    elements = 0
    values = tqdm(
        static_values(model, sites), desc="weights", total=len(sites), unit="site", leave=False,
        disable=not progress or not sites,
    )
    for site, value in values:
        observer = calibrator(sites[site].scheme).observer(sites[site].spec.granularity, static=True)
        observer.allows_mask = observer.finds_mask = site in maskable
        with _named(site):
            observer.observe(value)
        waiting[site], elements = observer, elements + value.numel()
        if elements > (AT_ONCE_ON_CPU if on_cpu(value) else AT_ONCE):
            encodings |= _static_encodings(waiting, sites, maskable)
            waiting, elements = {}, 0
    return encodings | _static_encodings(waiting, sites, maskable)


def _static_encodings(
    observers: Mapping[Site, Observer], sites: Mapping[Site, SitePlan], maskable: Collection[Site]
) -> dict[Site, Encoding]:
    """The encodings of observed parameters; an accelerator is waited for a few times for all of them."""
    settle(observers.values())
    unmasked = {}
    for site, observer in observers.items():
        with _named(site):
            observer.check()
            if observer.sentinels and site not in maskable:
                raise CalibrationError(f"{observer.sentinels} of its values are −inf or ≤ -1e30; {ADVICE}")
        if not observer.sentinels:
            unmasked[site] = observer
    try:
        return _encodings_of_observed({site: sites[site] for site in unmasked}, unmasked)
    except CalibrationError:
        for site, observer in unmasked.items():  # which of them
            with _named(site):
                calibrator(sites[site].scheme).encodings([observer], [sites[site].spec])
        raise


@contextmanager
def _named(site: Site) -> Iterator[None]:
    try:
        yield
    except CalibrationError as error:
        raise CalibrationError(f"{site}: {error}") from None


def _observed_on_data(
    simulation: Simulation, sites: Mapping[Site, SitePlan], data: CalibrationData, samples: SiteSamples,
    tokens: ValidTokens | None, contents: frozenset[object], maskable: Collection[Site],
) -> Mapping[Site, Observer]:
    """The observers of the sites whose ranges depend on data, after all ranks have run their data."""
    observers = {
        site: _observer(decided) for site, decided in sites.items()
        if not decided.static and (decided.range is None or (decided.min_fill and data.batches is not None))
        and not (decided.spec.dynamic and data.batches is None)
    }
    if not observers:
        return observers
    for site, observer in observers.items():
        observer.allows_mask = observer.finds_mask = site in maskable
    problem: Exception | None = None
    try:
        if data.batches is None:
            names = ", ".join(site.name for site in list(observers)[:3])
            raise CalibrationError(
                f"{len(observers)} activation sites need calibration data, the first of them {names}; "
                "pass batches, or make a weight-only sim with activation_bits=None"
            )
        with ExitStack() as while_data_run:
            if Trait.STACKS in contents:
                while_data_run.enter_context(matrices_counted(simulation))
            while_data_run.enter_context(_observing(simulation, observers, tokens, samples))
            if tokens is not None:
                while_data_run.enter_context(tokens.listening())
            while_data_run.enter_context(samples.followed())
            while_data_run.enter_context(missing_values_told(simulation, samples.front))
            run_all(simulation.model, data.batches, forward=data.forward if tokens is None else
                    tokens.forward(data.forward), num_batches=data.num_batches, label="calibrating",
                    progress=data.progress)
        if tokens is not None:
            tokens.warn_of_unfollowed({simulation.quantizers[site]: site.name for site in observers})
    except Exception as error:  # the other ranks are waiting
        problem = error
    return joined(observers, device_of(simulation.model), problem)


def _maskable_leaders(simulation: Simulation) -> set[Site]:
    """The sites whose encoding serves a value that may carry a mask."""
    plan = simulation.plan
    return {plan[site].leader or site for site in maskable_sites(simulation.model) if site in plan}


def _is_unseen(decided: SitePlan, observer: Observer) -> bool:
    """Says whether no data reached a site that has a range without them."""
    return decided.range is not None and observer.count == 0


def _masked_in_example(
    simulation: Simulation, sites: Mapping[Site, SitePlan], example: Batch, maskable: Collection[Site]
) -> dict[Site, str]:
    """The dynamically quantized sites that carry a mask in ``example``; none if it gives NaN or +inf."""
    observers = {site: _observer(decided) for site, decided in sites.items() if decided.spec.dynamic}
    for site, observer in observers.items():
        observer.finds_mask = site in maskable
    try:
        with _observing(simulation, observers):
            run_all(simulation.model, [example] if observers else [])
        return _masked(observers)
    except CalibrationError:
        return {}


def _observer(decided: SitePlan) -> Observer:
    if decided.spec.dynamic:
        return MinMax().observer(PER_TENSOR)
    return calibrator(decided.scheme).observer(decided.spec.granularity)


@contextmanager
def _observing(
    simulation: Simulation, observers: Mapping[Site, Observer], tokens: ValidTokens | None = None,
    samples: SiteSamples | None = None,
) -> Iterator[None]:
    """While the body runs, the model computes in float and ``observers`` see the values at their sites."""
    watched: dict[Quantizer, Any] = {simulation.quantizers[site]: observer for site, observer in observers.items()}
    weighted = [quantizer for quantizer, each in watched.items() if isinstance(each, WeightedHistogram)]
    seeing = watched if samples is None else samples.observers(watched)
    gradients = LocalGradients({quantizer: seeing[quantizer] for quantizer in weighted},
                               tokens or ValidTokens(simulation.model, None)) if weighted else None
    weighing = {} if gradients is None else gradients.observers
    try:
        for quantizer, observer in seeing.items():
            of_rows = observer if tokens is None else tokens.observer(observer, quantizer)
            quantizer.observer = weighing.get(quantizer) or of_rows
        with (
            in_mode(simulation.quantizers.values(), Mode.BYPASS), in_mode(seeing, Mode.OBSERVE),
            nullcontext() if gradients is None else gradients.listening(simulation.model),
        ):
            yield
    finally:
        for quantizer in seeing:
            quantizer.observer = None


def _masked(observers: Mapping[Site, Observer]) -> dict[Site, str]:
    """The sites that saw sentinels, each with the reason why it cannot be quantized.

    Raises: CalibrationError if one saw NaN or +inf.
    """
    reasons = {}
    for site, observer in observers.items():
        with _named(site):
            observer.check()
        if observer.sentinels:
            total = observer.count + observer.sentinels
            reasons[site] = f"carries a mask: {observer.sentinels} of {total} values are −inf, or far below all others"
    return reasons


def _encodings_of_observed(
    sites: Mapping[Site, SitePlan], observers: Mapping[Site, Observer]
) -> dict[Site, Encoding]:
    """Encodings of observed values, one scheme after the other. Raises: CalibrationError if a site saw no data."""
    by_scheme: dict[str, list[Site]] = {}
    starved = []
    for site, decided in sites.items():
        if decided.spec.dynamic:
            continue
        if observers[site].count == 0:
            starved.append(site.name)
        by_scheme.setdefault(decided.scheme, []).append(site)
    if starved:
        raise CalibrationError(
            f"no data reached {len(starved)} sites: {', '.join(starved[:5])}; calibrate with data that runs "
            "them (with variants: calls of each kind), or set them to float in the config"
        )
    encodings: dict[Site, Encoding] = {}
    for scheme, members in by_scheme.items():
        specs = [sites[site].spec for site in members]
        computed = calibrator(scheme).encodings([observers[site] for site in members], specs)
        encodings |= dict(zip(members, computed, strict=True))
    return encodings
