"""Layer-wise methods on a ``QuantSim``, in one walk through the model."""

from __future__ import annotations

import os
import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import zip_longest

import torch
from torch import Tensor, distributed, nn  # noqa: F401  the examples use it

from qtk.calibration.calibrate import parameter_encodings
from qtk.calibration.scale_floor import raise_scales
from qtk.capture.tracing import TRACING
from qtk.data.forward_pass import Data, Forward
from qtk.data.recorded_calls import recorded_calls
from qtk.data.valid_tokens import Valid
from qtk.errors import CalibrationError
from qtk.graph.simulation import HasSimulation, Simulation
from qtk.layerwise.layer_selection import select_layers
from qtk.layerwise.live_values import Offload
from qtk.layerwise.methods import LayerwiseMethod, method
from qtk.layerwise.originals import Start, unchanged_on_error, warn_of_earlier_results
from qtk.layerwise.report import LayerwiseReport
from qtk.layerwise.run import LayerwiseRun
from qtk.layerwise.walk import Inputs
from qtk.layerwise.weighted_layers import WeightedLayer, weighted_layers
from qtk.moments.holdout import Holdout, holdout_of
from qtk.nn.eval_mode import evaluating
from qtk.observers.ranks import agree, exchanged, several_ranks
from qtk.public import public
from qtk.quantizers.modes import caching, in_mode
from qtk.quantizers.quantizer import Mode
from qtk.workflow.rewrite import refuse_kept

LEFT = 0.1
"""Share of the parameters left as they are from which a warning is due."""


@public
def apply_layerwise(
    sim: HasSimulation, data: Data, methods: str | Iterable[str | LayerwiseMethod], *,
    inputs: Inputs = "asym", sites: Iterable[str] | str | None = None, forward: Forward | None = None,
    num_batches: int | None = None, offload: Offload = "none", checkpoint_dir: str | os.PathLike[str] | None = None,
    progress: bool = True, valid: Valid | None = None, holdout: float = 0.2, groups: Sequence[Hashable] | None = None,
    start: Start | None = None, keep_originals: bool = True,
) -> LayerwiseReport:
    """Applies several layer-wise methods in one walk: each layer is finished by all of them before the next.

    >>> import qtk
    >>> _ = torch.manual_seed(0)
    >>> model, batches = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(4, 64, 16)
    >>> sim = qtk.QuantSim(model, batches[0], weight_bits=4)
    >>> report = qtk.apply_layerwise(sim, batches, ["seq_mse", "gptq", "bias_correction"], progress=False)
    >>> print(report)  # doctest: +ELLIPSIS
    0.weight  ... → ... dB  held out ... → ... dB  SeqMse + Gptq + BiasCorrection, prior ...
    2.weight  ... → ... dB  held out ... → ... dB  SeqMse + Gptq + BiasCorrection, prior ...

    Settings follow the name; ``qtk.METHODS`` lists the names:

    >>> sim = qtk.QuantSim(model, batches[0], weight_bits=4)
    >>> report = qtk.apply_layerwise(sim, batches, ["seq_mse(refine=True)", "gptq(damping=0.05)"], progress=False)
    >>> list(qtk.METHODS)
    ['seq_mse', 'gptq', 'coordinate_descent', 'adaround', 'bias_correction']

    A loader of (input, label) pairs, of which two batches are enough:

    >>> pairs = [(x, 0) for x in batches]
    >>> sim = qtk.QuantSim(model, batches[0], weight_bits=4)
    >>> report = qtk.apply_layerwise(
    ...     sim, pairs, "gptq", forward=lambda model, batch: model(batch[0]), num_batches=2, progress=False)

    Another call starts from the float weights again, so that methods can be tried one after the other:

    >>> report = qtk.apply_layerwise(sim, batches, "adaround", start="float", progress=False)
    >>> bool(report.restarted)
    True

    Or it goes on from what the earlier one has left:

    >>> report = qtk.apply_layerwise(sim, batches, "coordinate_descent", start="present", progress=False)
    >>> [layer.after <= layer.before for layer in report.layers]
    [True, True]

    A run that survives being killed; the same call resumes it, here with nothing left to do:

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> for _ in range(2):
    ...     sim = qtk.QuantSim(model, batches[0], weight_bits=4)
    ...     report = qtk.apply_layerwise(sim, batches, "gptq", checkpoint_dir=folder, progress=False)
    >>> sorted(os.listdir(folder))
    ['0000.safetensors', '0001.safetensors', 'run.json']

    Args:
        sim: a ``QuantSim``; weights, their encodings and biases change, and the encodings are frozen.
        data: as for ``compute_encodings``; a few hundred samples. Under ``torchrun`` each rank passes its share.
        methods: names, with settings if need be, applied in this order.
        inputs: which inputs the output error of a layer is measured on. ``asym``: the float model's for the float
            weight, the quantized model's for the quantized weight; ``symqt`` and ``symfp``: for both weights the
            quantized or the float model's. Inside loops over time, and in models that stay Python, ``asym`` is
            ``symfp``.
        sites: weights to improve, by name or glob; ``None``: all.
        forward: how to run the model on a batch, e.g. ``lambda model, batch: model(batch[0])``; the float model runs
            once more for it.
        num_batches: batches to take of the data; ``None``: all.
        offload: where values are kept between layers: ``none``, on the device; ``cpu``; ``disk``, a temporary
            directory.
        checkpoint_dir: where every finished layer is saved; a killed run resumes from there, with the same result bit
            for bit.
        progress: show a bar.
        valid: which tokens count, as for ``compute_encodings``: statistics and errors leave the others out.
        holdout: fraction of the samples that methods do not see and their results are judged by: a layer changes only
            if its error over them falls; also sets the strength of the prior (``qtk.layerwise.candidates``). 0: all
            data are seen, and results always taken.
        groups: a label for each batch; whole groups are held out then, to judge by another kind of data. Bias
            correction alone, and losses other than the squared error, are not judged: they see all data.
        start: what a layer starts from that an earlier call has changed: ``float``, its float weight, bias and the
            encoding it had then; ``present``, the result of that call. ``None``: ``present`` for bias correction alone,
            else ``float``, with a warning. The float model is that of the originals in either case.
        keep_originals: keep the float weights and biases of changed layers for later calls, in host memory, with
            ``offload="disk"`` in temporary files: as many bytes as the parameters that change, as long as the
            simulation lives. A copy of the simulation and its pickle have them, ``state_dict`` and ``save`` do not.

    Returns: error and SQNR of every layer's output before and after, and the weights that were left, each with the
        reason; printable.

    Raises: ConfigError for an unknown method or setting; CalibrationError if ``sim`` is no ``QuantSim``, for data that
        reach no layer, do not run or hold NaN or infinity, for a name of no site, or a checkpoint of another run.
        After an exception, Ctrl-C included, the simulation is as it was; for that, what is overwritten is kept on the
        CPU. Finished layers stay in ``checkpoint_dir`` alone.
    """
    names = [methods] if isinstance(methods, str) else methods
    resolved = [each if isinstance(each, LayerwiseMethod) else method(each) for each in names]
    if not resolved:
        raise CalibrationError("no methods to apply; name at least one, e.g. 'seq_mse'")
    if not hasattr(sim, "simulation"):
        raise CalibrationError(f"layer-wise methods improve a QuantSim, got {type(sim).__name__}; make one of it")
    goes_on = start == "present" or (start is None and all(each.needs_bias for each in resolved))
    simulation = sim.simulation
    refuse_kept(sim)
    contexts = TRACING, torch.inference_mode(False), caching(simulation.model), evaluating(simulation.model)
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        problem: Exception | None = None
        try:
            layers, skipped = select_layers(simulation, resolved, sites)
            others = _others(simulation, layers)
            originals = stack.enter_context(unchanged_on_error([*layers, *others], on_disk=offload == "disk"))
            rewound, gone = originals.rewind()
            _load_missing_encodings(simulation, layers, progress)
            quantizers = list(dict.fromkeys(simulation.quantizers.values()))
            stack.enter_context(in_mode([q for q in quantizers if not q.ready], Mode.BYPASS))
            calls = recorded_calls(simulation.model, quantizers, data, forward, num_batches, valid)
        except Exception as error:  # the other ranks are waiting
            problem = error
        agree(problem)
        held_out = _holdout_of_ranks(holdout, groups, len(calls))
        restarted = () if goes_on else tuple(layer.name for layer in layers if layer in rewound)
        warn_of_earlier_results(restarted if start is None else (), gone)
        run = LayerwiseRun(
            simulation.model, resolved, layers, calls, inputs=inputs, offload=offload, checkpoint_dir=checkpoint_dir,
            originals=originals, holdout=held_out, replayed=[layer for layer in others if layer in rewound],
            present=goes_on,
        )
        results = run.finish(progress=progress)
        _warn_of_share(simulation, skipped, [layer.weight for layer in layers])
        reasons = {result.reason for result in results}
        if None not in reasons:
            raise CalibrationError(f"no layer was improved: {'; '.join(sorted(str(reason) for reason in reasons))}")
        raise_scales(simulation, {site for site in simulation.plan if site.name in {layer.name for layer in layers}})
        if keep_originals:
            originals.hand_over()
    return LayerwiseReport(tuple(results), skipped, restarted)


def _warn_of_share(simulation: Simulation, skipped: Mapping[str, str], improved: Sequence[Tensor]) -> None:
    """Warns if many of the parameters that a call was to improve are left as they are."""
    parameters = dict(simulation.model.named_parameters())
    left = {name: parameters[name].numel() for name in skipped if name in parameters}
    total = sum(left.values()) + sum(weight.numel() for weight in improved)
    if sum(left.values()) > LEFT * total:
        largest = sorted(left, key=left.__getitem__, reverse=True)
        named = "; ".join(f"{name} {skipped[name]}" for name in largest[:3])
        warnings.warn(
            f"{sum(left.values()) / total:.0%} of the parameters ({len(left)} of {len(left) + len(improved)} weights) "
            f"are left as they are: {named}{'; …' if largest[3:] else ''}", stacklevel=4,
        )


def _holdout_of_ranks(fraction: float, groups: Sequence[Hashable] | None, num_batches: int) -> Holdout | None:
    """The samples to hold out of this rank's batches: the same groups on all. Raises: on all, as ``holdout_of``."""
    if not several_ranks():
        return holdout_of(fraction, groups, num_batches)
    shares = exchanged((groups, num_batches), None)
    turns = zip_longest(*(own or () for own, _ in shares), fillvalue=shares)  # the batches of the ranks in turns
    labels = [label for turn in turns for label in turn if label is not shares]
    return [holdout_of(fraction, own, count, labels) for own, count in shares][distributed.get_rank()]


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
