"""The layer-wise methods as functions on a ``QuantSim``, each in one walk through the model."""

from __future__ import annotations

import os
import warnings
from collections.abc import Hashable, Iterable, Sequence
from contextlib import ExitStack

import torch
from torch import nn  # noqa: F401  the examples use it

from qtk.capture.tracing_lock import TRACING
from qtk.errors import CalibrationError
from qtk.graph.simulation import HasSimulation, Simulation
from qtk.layerwise.adaround import AdaRound
from qtk.layerwise.bias_correction import BiasCorrection
from qtk.layerwise.gptq import Gptq
from qtk.layerwise.holdout import holdout_of
from qtk.layerwise.layer_selection import select_layers
from qtk.layerwise.live_values import Offload
from qtk.layerwise.methods import LayerwiseMethod, method
from qtk.layerwise.originals import unchanged_on_error
from qtk.layerwise.report import LayerwiseReport
from qtk.layerwise.run import LayerwiseRun
from qtk.layerwise.seq_mse import SeqMse
from qtk.layerwise.walk import Inputs
from qtk.layerwise.weighted_layers import WeightedLayer
from qtk.nn.eval_mode import evaluating
from qtk.observers.ranks import agree
from qtk.public import public
from qtk.quantizers.modes import caching, in_mode
from qtk.quantizers.quantizer import Mode
from qtk.workflow.calibrate import parameter_encodings
from qtk.workflow.forward_pass import Data, Forward
from qtk.workflow.recorded_calls import recorded_calls
from qtk.workflow.rewrite import refuse_kept
from qtk.workflow.scale_floor import raise_scales
from qtk.workflow.valid_tokens import Valid


@public
def apply_seq_mse(
    sim: HasSimulation, data: Data, *,
    num_candidates: int = 20, refine: bool = False, joint: bool = False, exact: bool = False, loss: str = "mse",
    inputs: Inputs = "asym", sites: Iterable[str] | str | None = None, forward: Forward | None = None,
    num_batches: int | None = None, offload: Offload = "none", checkpoint_dir: str | os.PathLike[str] | None = None,
    progress: bool = True, valid: Valid | None = None,
) -> LayerwiseReport:
    """Sequential MSE: gives every weight the scales with which the output of its layer changes least.

    >>> import qtk
    >>> _ = torch.manual_seed(0)
    >>> model, batches = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(4, 64, 16)
    >>> sim = qtk.QuantSim(model, batches[0], weight_bits=4)
    >>> report = qtk.apply_seq_mse(sim, batches, progress=False)
    >>> [layer.after <= layer.before for layer in report.layers]
    [True, True]

    The encodings are frozen, so that ``compute_encodings`` keeps them:

    >>> sim.compute_encodings(batches, progress=False)
    >>> [name for name, quantizer in sim.quantizers.items() if quantizer.frozen]
    ['0.weight', '2.weight']

    A finer search of one layer; frozen encodings are searched again only after ``unfreeze``:

    >>> sim.unfreeze("0.weight")
    >>> report = qtk.apply_seq_mse(sim, batches, num_candidates=50, refine=True, sites="0.*", progress=False)
    >>> [layer.name for layer in report.layers]
    ['0.weight']

    Args:
        sim: a ``QuantSim``; its encodings of weights change.
        data: as for ``compute_encodings``; a few hundred samples.
        num_candidates: ranges tried for every scale: ``i / num_candidates`` times the present one.
        refine: try as many once more, around the best.
        joint: for weights quantized in blocks, then block-coordinate descent on the error of the whole output.
        exact: compute the error of every candidate; otherwise estimates pick those whose errors are computed.
        loss: ``mse``, ``sqnr`` or ``l1``, see ``qtk.layerwise.seq_mse.SeqMse``.
        inputs: the inputs that errors are measured on: ``asym``, ``symqt`` or ``symfp``, see ``apply_layerwise``.
        sites: weights to improve, by name or glob; ``None``: all.
        forward: how to run the model on a batch, e.g. ``lambda model, batch: model(batch[0])``.
        num_batches: batches to take of the data; ``None``: all.
        offload: where values are kept between layers: ``none``, ``cpu`` or ``disk``.
        checkpoint_dir: where finished layers are saved; a killed run resumes from there.
        progress: show a bar.
        valid: which tokens count, as for ``compute_encodings``.

    Returns: error and SQNR of every layer's output before and after; printable.

    Raises: as ``apply_layerwise``.
    """
    return apply_layerwise(
        sim, data, [SeqMse(num_candidates, refine, joint, exact, loss)], inputs=inputs, sites=sites, forward=forward,
        num_batches=num_batches, offload=offload, checkpoint_dir=checkpoint_dir, progress=progress,
        valid=valid,
    )


@public
def apply_gptq(
    sim: HasSimulation, data: Data, *,
    damping: float = 0.01, act_order: bool = True,
    inputs: Inputs = "asym", sites: Iterable[str] | str | None = None, forward: Forward | None = None,
    num_batches: int | None = None, offload: Offload = "none", checkpoint_dir: str | os.PathLike[str] | None = None,
    progress: bool = True, valid: Valid | None = None,
) -> LayerwiseReport:
    """GPTQ: rounds weights column by column, each error propagated to the remaining columns by the inverse Hessian.

    Frantar et al., arXiv 2210.17323, algorithm 1; the scales stay what they are.

    >>> import qtk
    >>> _ = torch.manual_seed(0)
    >>> model, batches = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(4, 64, 16)
    >>> sim = qtk.QuantSim(model, batches[0], weight_bits=4)
    >>> report = qtk.apply_gptq(sim, batches, progress=False)
    >>> [layer.after < layer.before for layer in report.layers]
    [True, True]

    The new weights lie on the quantization grid, whose encodings are frozen:

    >>> weight = sim.model.get_parameter("0.weight")
    >>> torch.equal(sim.quantizers["0.weight"](weight), weight), sim.quantizers["0.weight"].frozen
    (True, True)

    Data of too few samples makes it fit noise, which it warns of; a larger damping helps:

    >>> sim = qtk.QuantSim(model, batches[0], weight_bits=4)
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     report = qtk.apply_gptq(sim, batches[:1, :20], damping=0.1, progress=False)

    Args:
        sim: a ``QuantSim``; its weights change.
        data: as for ``compute_encodings``; a few hundred samples, at least twice as many rows as a layer has columns.
        damping: added to the diagonal of the Hessian, as a multiple of its mean.
        act_order: round the columns with the largest inputs first.
        inputs: the inputs that errors are measured on: ``asym``, ``symqt`` or ``symfp``, see ``apply_layerwise``.
        sites: weights to improve, by name or glob; ``None``: all.
        forward: how to run the model on a batch, e.g. ``lambda model, batch: model(batch[0])``.
        num_batches: batches to take of the data; ``None``: all.
        offload: where values are kept between layers: ``none``, ``cpu`` or ``disk``.
        checkpoint_dir: where finished layers are saved; a killed run resumes from there.
        progress: show a bar.
        valid: which tokens count, as for ``compute_encodings``.

    Returns: error and SQNR of every layer's output before and after; printable.

    Raises: as ``apply_layerwise``; CalibrationError if a damped Hessian has no inverse.
    """
    return apply_layerwise(
        sim, data, [Gptq(damping, act_order)], inputs=inputs, sites=sites, forward=forward, num_batches=num_batches,
        offload=offload, checkpoint_dir=checkpoint_dir, progress=progress,
        valid=valid,
    )


@public
def apply_adaround(
    sim: HasSimulation, data: Data, *,
    iterations: int = 100, through_activation: bool = False,
    inputs: Inputs = "asym", sites: Iterable[str] | str | None = None, forward: Forward | None = None,
    num_batches: int | None = None, offload: Offload = "none", checkpoint_dir: str | os.PathLike[str] | None = None,
    progress: bool = True, valid: Valid | None = None,
) -> LayerwiseReport:
    """AdaRound: learns for every weight whether it is rounded up or down, so that its layer's output changes least.

    Nagel et al., arXiv 2004.10568, equations 21 to 25; the scales stay what they are.

    >>> import qtk
    >>> _ = torch.manual_seed(0)
    >>> model, batches = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(4, 64, 16)
    >>> sim = qtk.QuantSim(model, batches[0], weight_bits=4)
    >>> report = qtk.apply_adaround(sim, batches, iterations=100, progress=False)
    >>> [layer.after < layer.before for layer in report.layers]
    [True, True]

    Minimizing the error after the ReLU that follows ``0``, so that errors of negative outputs do not count:

    >>> sim = qtk.QuantSim(model, batches[0], weight_bits=4)
    >>> report = qtk.apply_adaround(sim, batches, iterations=100, through_activation=True, progress=False)

    Float formats have no evenly spaced neighbours to choose from and are left:

    >>> fp8 = {"version": 1, "extends": "default", "rules": [{"match": {"path": "0"}, "weight": {"dtype": "fp8_e4m3"}}]}
    >>> sim = qtk.QuantSim(model, batches[0], config=fp8)
    >>> print(qtk.apply_adaround(sim, batches, iterations=10, progress=False).skipped["0.weight"])
    AdaRound needs codes that are integers, not fp8_e4m3

    Args:
        sim: a ``QuantSim``; its weights change.
        data: as for ``compute_encodings``; a few hundred samples.
        iterations: steps of its optimizer.
        through_activation: where a ReLU, GELU or the like alone reads the output of a layer, minimize the error after
            it (equation 25), on a sample of rows.
        inputs: the inputs that errors are measured on: ``asym``, ``symqt`` or ``symfp``, see ``apply_layerwise``.
        sites: weights to improve, by name or glob; ``None``: all.
        forward: how to run the model on a batch, e.g. ``lambda model, batch: model(batch[0])``.
        num_batches: batches to take of the data; ``None``: all.
        offload: where values are kept between layers: ``none``, ``cpu`` or ``disk``.
        checkpoint_dir: where finished layers are saved; a killed run resumes from there.
        progress: show a bar.
        valid: which tokens count, as for ``compute_encodings``.

    Returns: error and SQNR of every layer's output before and after; printable.

    Raises: as ``apply_layerwise``.
    """
    return apply_layerwise(
        sim, data, [AdaRound(iterations, through_activation=through_activation)], inputs=inputs, sites=sites,
        forward=forward, num_batches=num_batches, offload=offload, checkpoint_dir=checkpoint_dir, progress=progress,
        valid=valid,
    )


@public
def correct_bias(
    sim: HasSimulation, data: Data, *,
    inputs: Inputs = "asym", sites: Iterable[str] | str | None = None, forward: Forward | None = None,
    num_batches: int | None = None, offload: Offload = "none", checkpoint_dir: str | os.PathLike[str] | None = None,
    progress: bool = True, valid: Valid | None = None,
) -> LayerwiseReport:
    """Bias correction: corrects biases so that every output of a layer has its mean in the float model.

    Nagel et al., arXiv 1906.04721, section 4.2, with measured means.

    >>> import qtk
    >>> _ = torch.manual_seed(0)
    >>> model, batches = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(4, 64, 16)
    >>> sim = qtk.QuantSim(model, batches[0], weight_bits=2, activation_bits=None)
    >>> report = qtk.correct_bias(sim, batches, progress=False)
    >>> x = batches.flatten(0, 1)
    >>> torch.allclose(sim.model(x).mean(0), model(x).mean(0), atol=1e-4)
    True

    A layer without a bias is left:

    >>> model[0].bias = None
    >>> sim = qtk.QuantSim(model, batches[0], weight_bits=2)
    >>> qtk.correct_bias(sim, batches, progress=False).skipped
    {'0.weight': 'it has no bias to correct'}

    After another method, in one call:

    >>> sim = qtk.QuantSim(model, batches[0], weight_bits=2)
    >>> report = qtk.apply_layerwise(sim, batches, ["seq_mse", "bias_correction"], progress=False)

    Args:
        sim: a ``QuantSim``; its biases change, and the encodings of their weights are frozen.
        data: as for ``compute_encodings``; a few hundred samples.
        inputs: the inputs that errors are measured on: ``asym``, ``symqt`` or ``symfp``, see ``apply_layerwise``.
        sites: weights to improve, by name or glob; ``None``: all.
        forward: how to run the model on a batch, e.g. ``lambda model, batch: model(batch[0])``.
        num_batches: batches to take of the data; ``None``: all.
        offload: where values are kept between layers: ``none``, ``cpu`` or ``disk``.
        checkpoint_dir: where finished layers are saved; a killed run resumes from there.
        progress: show a bar.
        valid: which tokens count, as for ``compute_encodings``.

    Returns: error and SQNR of every layer's output before and after; printable.

    Raises: as ``apply_layerwise``.
    """
    return apply_layerwise(
        sim, data, [BiasCorrection()], inputs=inputs, sites=sites, forward=forward, num_batches=num_batches,
        offload=offload, checkpoint_dir=checkpoint_dir, progress=progress,
        valid=valid,
    )


@public
def apply_layerwise(
    sim: HasSimulation, data: Data, methods: str | Iterable[str | LayerwiseMethod], *,
    inputs: Inputs = "asym", sites: Iterable[str] | str | None = None, forward: Forward | None = None,
    num_batches: int | None = None, offload: Offload = "none", checkpoint_dir: str | os.PathLike[str] | None = None,
    holdout: float = 0.2, groups: Sequence[Hashable] | None = None, progress: bool = True,
    valid: Valid | None = None,
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
        holdout: fraction of the samples that methods do not see and their results are judged by: a layer changes only
            if its error over them falls; also sets the strength of the prior (``qtk.layerwise.candidates``). 0: all
            data are seen, and results always taken.
        groups: a label for each batch; whole groups are held out then, to judge by another kind of data.
        progress: show a bar.
        valid: which tokens count, as for ``compute_encodings``: statistics and errors leave the others out.

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
    simulation = sim.simulation
    refuse_kept(sim)
    contexts = TRACING, torch.inference_mode(False), caching(simulation.model), evaluating(simulation.model)
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        problem: Exception | None = None
        try:
            layers, skipped = select_layers(simulation, resolved, sites)
            originals = stack.enter_context(unchanged_on_error(layers))
            _load_missing_encodings(simulation, layers, progress)
            quantizers = list(dict.fromkeys(simulation.quantizers.values()))
            stack.enter_context(in_mode([q for q in quantizers if not q.ready], Mode.BYPASS))
            calls = recorded_calls(simulation.model, quantizers, data, forward, num_batches, valid)
            held_out = holdout_of(holdout, groups, len(calls))
        except Exception as error:  # the other ranks are waiting
            problem = error
        agree(problem)
        _warn_of_earlier_calls(layers)
        run = LayerwiseRun(
            simulation.model, resolved, layers, calls, inputs=inputs, offload=offload, checkpoint_dir=checkpoint_dir,
            originals=originals, holdout=held_out,
        )
        results = run.finish(progress=progress)
        reasons = {result.reason for result in results}
        if None not in reasons:
            raise CalibrationError(f"no layer was improved: {'; '.join(sorted(str(reason) for reason in reasons))}")
        raise_scales(simulation, {site for site in simulation.plan if site.name in {layer.name for layer in layers}})
    return LayerwiseReport(tuple(results), skipped)


def _warn_of_earlier_calls(layers: Sequence[WeightedLayer]) -> None:
    """Warns that weights rewritten by an earlier call count as those of the float model."""
    names = [layer.name for layer in layers if layer.quantizer.rewrote_weight]
    if names:
        warnings.warn(
            f"an earlier call rewrote the weights of {len(names)} layers ({names[0]}, …): they now count as the float "
            "model; put all methods into one apply_layerwise, on a simulation made anew", stacklevel=3,
        )


def _load_missing_encodings(simulation: Simulation, layers: Sequence[WeightedLayer], progress: bool) -> None:
    missing = {layer.name for layer in layers if layer.quantizer.scale is None}
    sites = {site: decided for site, decided in simulation.plan.items() if site.name in missing}
    for site, encoding in parameter_encodings(simulation.model, sites, progress).items():
        simulation.quantizers[site].load_encoding(encoding)
