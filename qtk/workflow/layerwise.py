"""Layer-wise methods on a ``QuantSim``, in one walk through the model."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn

from qtk.calibration.calibrate import parameter_encodings
from qtk.calibration.scale_floor import raise_scales
from qtk.calls.calls import Call
from qtk.capture.tracing import TRACING
from qtk.data.forward_pass import Data, Forward
from qtk.data.recorded_calls import recorded_calls
from qtk.data.valid_tokens import Valid
from qtk.errors import CalibrationError
from qtk.graph.graphs import graphs, meta_of
from qtk.graph.simulation import HasSimulation, Simulation
from qtk.graph.sites import value_site
from qtk.layerwise.block_run import BlockRun
from qtk.layerwise.layer_selection import select_layers
from qtk.layerwise.methods import LayerwiseMethod, method
from qtk.layerwise.options import DEFAULT, LayerwiseOptions
from qtk.layerwise.originals import EarlierResults, Originals, Start, unchanged_on_error, warn_of_earlier_results
from qtk.layerwise.output_judge import OutputJudge
from qtk.layerwise.reconstruction import Reconstruction
from qtk.layerwise.report import LayerwiseReport
from qtk.layerwise.run import LayerwiseRun
from qtk.layerwise.weighted_layers import WeightedLayer, weighted_layers
from qtk.moments.holdout import holdout_of
from qtk.nn.eval_mode import evaluating
from qtk.nn.mapped_weights import bounded
from qtk.observers.ranks import agree, several_ranks
from qtk.public import public
from qtk.quantizers.modes import caching, in_mode
from qtk.quantizers.quantizer import Mode
from qtk.transforms.rewrite import refuse_kept
from qtk.transforms.steps import STEPS
from qtk.workflow.forecast import say_forecast

LEFT = 0.1
"""Share of the parameters left as they are from which a warning is due."""


@public
def apply_layerwise(
    sim: HasSimulation, data: Data, methods: str | Iterable[str | LayerwiseMethod], *,
    sites: Iterable[str] | str | None = None, forward: Forward | None = None, num_batches: int | None = None,
    valid: Valid | None = None, progress: bool = True, options: LayerwiseOptions = DEFAULT,
) -> LayerwiseReport:
    """Applies several layer-wise methods in one walk: each layer is finished by all of them before the next.

    >>> import qtk
    >>> _ = torch.manual_seed(2)
    >>> model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    >>> batches = torch.randn(4, 64, 16) @ torch.randn(16, 16)
    >>> sim = qtk.QuantSim(model, batches[0], weight_bits=4)
    >>> report = qtk.apply_layerwise(sim, batches, ["seq_mse", "gptq", "bias_correction"], progress=False)
    >>> print(report)  # doctest: +ELLIPSIS
    0.weight  ... → ... dB  held out ... → ... dB  SeqMse + Gptq + BiasCorrection, prior ...
    2.weight  ... → ... dB  held out ... → ... dB  SeqMse + Gptq + BiasCorrection, prior ...

    Settings follow the name; ``qtk.METHODS`` lists the names:

    >>> sim = qtk.QuantSim(model, batches[0], weight_bits=4)
    >>> report = qtk.apply_layerwise(sim, batches, ["seq_mse(refine=True)", "gptq(damping=0.05)"], progress=False)
    >>> list(qtk.METHODS)
    ['seq_mse', 'gptq', 'coordinate_descent', 'adaround', 'bias_correction', 'reconstruction']

    A loader of (input, label) pairs, of which two batches are enough:

    >>> pairs = [(x, 0) for x in batches]
    >>> sim = qtk.QuantSim(model, batches[0], weight_bits=4)
    >>> report = qtk.apply_layerwise(
    ...     sim, pairs, "gptq", forward=lambda model, batch: model(batch[0]), num_batches=2, progress=False)

    Another call starts from the float weights again, so that methods can be tried one after the other:

    >>> report = qtk.apply_layerwise(
    ...     sim, batches, "adaround", options=qtk.LayerwiseOptions(start="float"), progress=False)
    >>> bool(report.restarted)
    True

    Or it goes on from what the earlier one has left:

    >>> report = qtk.apply_layerwise(
    ...     sim, batches, "coordinate_descent", options=qtk.LayerwiseOptions(start="present"), progress=False)
    >>> [layer.after <= layer.before for layer in report.layers]
    [True, True]

    Whether the chain or one of its methods alone keeps the model's outputs closer, over samples that none has seen:

    >>> report = qtk.apply_layerwise(sim, batches, ["seq_mse", "coordinate_descent"], progress=False,
    ...     options=qtk.LayerwiseOptions(start="float", judge_parts=True))
    >>> list(report.judged)
    ['plain rounding', 'SeqMse + CoordinateDescent', 'SeqMse', 'CoordinateDescent']

    Args:
        sim: a ``QuantSim``; weights, their encodings and biases change, and the encodings are frozen.
        data: as for ``compute_encodings``; a few hundred samples. Under ``torchrun`` each rank passes its share.
        methods: names, with settings if need be, applied in this order.
        sites: weights to improve, by name or glob; ``None``: all.
        forward: how to run the model on a batch, as for ``compute_encodings``; the float model runs once more for it.
        num_batches: batches to take of the data; ``None``: all.
        valid: which tokens count, as for ``compute_encodings``: statistics and errors leave the others out.
        progress: show a bar.
        options: how the run goes through the layers, and what its results are judged by.

    Returns: error and SQNR of every layer's output before and after, and the weights that were left, each with the
        reason; printable.

    Raises: ConfigError for an unknown method or setting; CalibrationError if ``sim`` is no ``QuantSim``, for data that
        reach no layer, do not run or hold NaN or infinity, for a name of no site, or a checkpoint of another run.
        After an exception, Ctrl-C included, the simulation is as it was; for that, what is overwritten is kept on the
        CPU. Finished layers stay in ``options.checkpoint_dir`` alone.
    """
    names = [methods] if isinstance(methods, str) else methods
    resolved = [each if isinstance(each, LayerwiseMethod) else method(each) for each in names]
    if not resolved:
        raise CalibrationError("no methods to apply; name at least one, e.g. 'seq_mse'")
    if not hasattr(sim, "simulation"):
        raise CalibrationError(f"layer-wise methods improve a QuantSim, got {type(sim).__name__}; make one of it")
    *others_first, last = resolved
    if any(isinstance(each, Reconstruction) for each in others_first):
        raise CalibrationError("reconstruction learns whole blocks, after all other methods; name it last")
    call = _Call(sites, forward, num_batches, valid, progress)
    if isinstance(last, Reconstruction) and others_first:
        return _then_reconstruct(sim, data, others_first, last, call, options)
    if options.judge_parts and others_first:
        return _best_part(sim, data, resolved, call, options)
    return _applied(sim, data, resolved, call, options)


@dataclass(frozen=True, slots=True)
class _Call:
    """The keywords of a call, as for ``apply_layerwise``."""

    sites: Iterable[str] | str | None
    forward: Forward | None
    num_batches: int | None
    valid: Valid | None
    progress: bool


@dataclass(slots=True)
class _Judged:
    """The judge that all parts of a chain share, made by the first of them, and what it has measured."""

    judge: OutputJudge | None = None
    plain: float = math.nan
    divergence: float = math.nan

    def begin(self, model: nn.Module, calls: Sequence[Call], options: LayerwiseOptions) -> None:
        """Notes the outputs of the float model, whose weights are in place, and how far plain rounding is from them."""
        holdout = holdout_of(options.holdout, options.groups, len(calls))
        if self.judge is None and holdout is not None:
            self.judge = OutputJudge(model, calls, holdout)
            self.plain = self.judge.divergence()

    def end(self) -> None:
        """Measures the outputs as they are now."""
        assert self.judge is not None
        self.divergence = self.judge.divergence()


def _applied(
    sim: HasSimulation, data: Data, resolved: Sequence[LayerwiseMethod], call: _Call, options: LayerwiseOptions,
    judged: _Judged | None = None,
) -> LayerwiseReport:
    """Applies the methods in one walk. Changes ``judged``, if it is given: measures the outputs afterwards."""
    last, progress = resolved[-1], call.progress
    start, simulation = options.start, sim.simulation
    goes_on = (start or _start_of(resolved)) == "present"
    if STEPS in meta_of(simulation.model):
        refuse_kept(sim)
    contexts = (TRACING, torch.inference_mode(False), caching(simulation.model), evaluating(simulation.model),
                bounded(simulation.model))
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        problem: Exception | None = None
        try:
            layers, skipped = select_layers(simulation, resolved, call.sites)
            others = _others(simulation, layers)
            originals = stack.enter_context(
                unchanged_on_error([*layers, *others], on_disk=options.offload == "disk"))
            rewound, gone = originals.rewind()
            _load_missing_encodings(simulation, layers, progress)
            quantizers = list(dict.fromkeys(simulation.quantizers.values()))
            stack.enter_context(in_mode([q for q in quantizers if not q.ready], Mode.BYPASS))
            calls = recorded_calls(simulation.model, quantizers, data, call.forward, call.num_batches, call.valid)
            if judged is not None:
                judged.begin(simulation.model, calls, options)
        except Exception as error:  # the other ranks are waiting
            problem = error
        agree(problem)
        restarted = () if goes_on else tuple(layer.name for layer in layers if layer in rewound)
        warn_of_earlier_results(restarted if start is None else (), gone)
        earlier = EarlierResults(originals, tuple(layer for layer in others if layer in rewound), goes_on)
        say_forecast(simulation, resolved, calls, options=options, progress=progress)
        run = (BlockRun(simulation.model, last, layers, calls, options, earlier) if isinstance(last, Reconstruction)
               else LayerwiseRun(simulation.model, resolved, layers, calls, options, earlier))
        results = run.finish(progress=progress)
        _warn_of_share(simulation, skipped, [layer.weight for layer in layers])
        reasons = {result.reason for result in results}
        if None not in reasons:
            raise CalibrationError(f"no layer was improved: {'; '.join(sorted(str(reason) for reason in reasons))}")
        raise_scales(simulation, {site for site in simulation.plan if site.name in {layer.name for layer in layers}})
        if judged is not None:
            judged.end()
        if options.keep_originals:
            originals.hand_over()
    return LayerwiseReport(tuple(results), skipped, restarted, run.pooled, run.dense)


def _then_reconstruct(
    sim: HasSimulation, data: Data, methods: Sequence[LayerwiseMethod], last: Reconstruction, call: _Call,
    options: LayerwiseOptions,
) -> LayerwiseReport:
    """Reconstructs blocks from what the other methods make of their layers; both or neither."""
    data = list(islice(data, call.num_batches)) if isinstance(data, Iterator) else data
    layers = weighted_layers(sim.simulation.model, sim.simulation.plan)[0]
    folder = None if options.checkpoint_dir is None else Path(options.checkpoint_dir)
    with unchanged_on_error(layers, on_disk=options.offload == "disk") as originals:
        originals.keep(*(layer.weight for layer in layers), *(layer.bias for layer in layers))
        first, second = (
            apply(replace(options, checkpoint_dir=None if folder is None else folder / name, **changes))
            for apply, name, changes in (
                (partial(_best_part if options.judge_parts and methods[1:] else _applied, sim, data, methods, call),
                 "layers", {"keep_originals": True}),
                (partial(_applied, sim, data, [last], call), "blocks",
                 {"start": "present", "sparsity": None, "calibrate_all_experts": False, "judge_parts": False}))
        )
    return replace(first, layers=first.layers + second.layers)


def _best_part(
    sim: HasSimulation, data: Data, methods: Sequence[LayerwiseMethod], call: _Call, options: LayerwiseOptions
) -> LayerwiseReport:
    """Applies every method alone, then all, each from the same state, and keeps the result with the best outputs.

    Raises: CalibrationError in several processes.
    """
    if several_ranks():
        raise CalibrationError("judge_parts runs in one process; leave it out, or call without torchrun")
    if isinstance(data, Iterable):  # a loader that shuffles would hold out other samples for each part
        data = list(islice(data, call.num_batches))
    layers = weighted_layers(sim.simulation.model, sim.simulation.plan)[0]
    parameters = [each for layer in layers for each in (layer.weight, layer.bias)]
    folder, on_disk = options.checkpoint_dir, options.offload == "disk"
    judged, best, found = _Judged(), None, {}
    kinds = [type(each) for each in methods]
    names = {id(each): repr(each) if kinds.count(type(each)) > 1 else type(each).__name__ for each in methods}
    with torch.inference_mode(False), unchanged_on_error(layers, on_disk=on_disk) as before:
        before.keep(*parameters)
        for index, part in enumerate((methods, *([each] for each in methods))):
            if index:  # the first has warned of earlier results
                before.restore()
                options = replace(options, start=options.start or _start_of(methods))
            own = replace(options, checkpoint_dir=None if folder is None else Path(folder, str(index)))
            try:
                report = _applied(sim, data, part, call, own, judged)
            except CalibrationError:
                if not index:
                    raise
                continue  # it works beside the others alone, as bias correction without a bias
            name = " + ".join(map(names.__getitem__, map(id, part)))
            found[name] = judged.divergence
            if best is None or judged.divergence < best[0]:
                kept = Originals(layers, on_disk=on_disk)
                kept.keep(*parameters)
                best = judged.divergence, report, kept, name
        assert best is not None
        best[2].restore()
    if not math.isfinite(best[0]):
        warnings.warn("judge_parts: no result has outputs whose divergence from float is finite, and the chain is "
                      "kept unjudged; look for infinite or NaN outputs", stacklevel=5)
    return replace(best[1], judged={"plain rounding": judged.plain, **found}, kept=best[3])


def _start_of(methods: Sequence[LayerwiseMethod]) -> Start:
    """Returns what a call without ``start`` goes on from."""
    return "present" if all(each.needs_bias or isinstance(each, Reconstruction) for each in methods) else "float"


def _warn_of_share(simulation: Simulation, skipped: Mapping[str, str], improved: Sequence[Tensor]) -> None:
    """Warns if many of the parameters that a call was to improve are left as they are."""
    values = {value_site(node).name: node.meta.get("val")  # some are computed from parameters
              for graph in graphs(simulation.model).values() for node in graph.graph.nodes}
    values |= simulation.model.named_parameters()
    left = {name: values[name].numel() for name in skipped if isinstance(values.get(name), Tensor)}
    total = sum(left.values()) + sum(weight.numel() for weight in improved)
    if sum(left.values()) > LEFT * total:
        largest = sorted(left, key=left.__getitem__, reverse=True)
        named = "; ".join(f"{name} {skipped[name]}" for name in largest[:3])
        warnings.warn(
            f"{sum(left.values()) / total:.0%} of the parameters ({len(left)} of {len(left) + len(improved)} weights) "
            f"are left as they are: {named}{'; …' if largest[3:] else ''}", stacklevel=4,
        )


def _others(simulation: Simulation, layers: Sequence[WeightedLayer]) -> list[WeightedLayer]:
    """The layers that are not worked on, if an earlier call has changed any of them."""
    quantizers = simulation.quantizers.values()
    if not any(quantizer.original is not None or quantizer.rewrote_weight for quantizer in quantizers):
        return []
    names = {layer.name for layer in layers}
    return [layer for layer in weighted_layers(simulation.model, simulation.plan)[0] if layer.name not in names]


def _load_missing_encodings(simulation: Simulation, layers: Sequence[WeightedLayer], progress: bool) -> None:
    missing = {layer.name for layer in layers if layer.quantizer.scale is None}
    sites = {site: decided for site, decided in simulation.plan.items() if site.name in missing}
    for site, encoding in parameter_encodings(simulation.model, sites, progress).items():
        simulation.quantizers[site].load_encoding(encoding)
