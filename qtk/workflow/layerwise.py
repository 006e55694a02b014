"""Improves the weights of a simulation layer by layer, in one walk through the model."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Protocol, TypedDict, get_args

import torch
from torch import nn
from tqdm import tqdm
from typing_extensions import Unpack

from qtk.capture.call_recording import Recorded, recording
from qtk.capture.calls import Call
from qtk.core.plan import QuantPlan
from qtk.errors import CalibrationError
from qtk.layerwise.adaround import AdaptiveRounding
from qtk.layerwise.bias_correction import BiasCorrection
from qtk.layerwise.checkpoint import Checkpoint
from qtk.layerwise.gptq import GptqRounding
from qtk.layerwise.interrupts import uninterrupted
from qtk.layerwise.layer_state import Step, block_of, owner_of
from qtk.layerwise.layer_update import LayerUpdate, improved
from qtk.layerwise.live_values import Offload
from qtk.layerwise.methods import step
from qtk.layerwise.ranks import summed
from qtk.layerwise.report import LayerResult, LayerwiseReport
from qtk.layerwise.second_moments import Wanted
from qtk.layerwise.seq_mse import SeqMse
from qtk.layerwise.walk import Inputs, LayerInput, Outputs, walk
from qtk.layerwise.weighted_layers import WeightedLayer, weighted_layers
from qtk.nn.device import device_of
from qtk.nn.eval_mode import evaluating
from qtk.observers.ranks import agree, from_first
from qtk.planning.selection import leaders
from qtk.quantizers.modes import in_mode
from qtk.quantizers.quantizer import Mode, Quantizer
from qtk.workflow.calibrate import parameter_encodings
from qtk.workflow.forward_pass import Data, Forward, run_all


class Simulation(Protocol):
    """What is improved: a ``QuantSim``."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def plan(self) -> QuantPlan: ...

    @property
    def quantizers(self) -> Mapping[str, Quantizer]: ...


class WalkOptions(TypedDict, total=False):
    """How a model is walked through, whatever the method.

    Args:
        inputs: what a layer's output is to stay equal to: ``asym``, the float model's output, with the quantized
            model's input; ``symqt`` and ``symfp``, the output of the float weight on the quantized or the float model's
            input. Inside of loops over time, and in models that stay Python, ``asym`` is ``symfp``.
        sites: weights to improve, by name or glob; all, if left out.
        forward: how to run the model on a batch, e.g. ``lambda model, batch: model(batch[0])``; the float model runs
            once more for it.
        num_batches: stop after so many.
        offload: where values wait between layers: ``none``, on the device; ``cpu``; ``disk``, a temporary directory.
        checkpoint_dir: where every finished layer is saved; a run that was killed goes on from there, and ends bit for
            bit where it would have ended.
        progress: show a bar.
    """

    inputs: Inputs
    sites: Iterable[str] | str | None
    forward: Forward | None
    num_batches: int | None
    offload: Offload
    checkpoint_dir: str | os.PathLike[str] | None
    progress: bool


def apply_seq_mse(
    sim: Simulation, data: Data, *, num_candidates: int = 20, refine: bool = False, joint: bool = False,
    exact: bool = False, loss: str = "mse", **options: Unpack[WalkOptions],
) -> LayerwiseReport:
    """Sequential MSE: for every scale of a weight the range with which the output of its layer changes least.

    The encodings it finds are frozen, so that ``compute_encodings`` leaves them.

    Args:
        sim: is changed.
        data: as for ``compute_encodings``; a few hundred samples.
        num_candidates: ranges tried: ``i / num_candidates`` times the present one.
        refine: try as many once more, around the winner.
        joint: of weights quantized in blocks, let blocks make up for each other.
        exact: compute the error of every candidate; otherwise estimates choose those that are.
        loss: ``mse``, ``sqnr`` or ``l1``, as ``SeqMse`` says.
        options: see ``WalkOptions``.

    Raises: CalibrationError for data that do not reach a layer or hold NaN or infinity.
    """
    return apply_layerwise(sim, data, [SeqMse(num_candidates, refine, joint, exact, loss)], **options)


def apply_gptq(
    sim: Simulation, data: Data, *, damping: float = 0.01, act_order: bool = True, **options: Unpack[WalkOptions]
) -> LayerwiseReport:
    """GPTQ (arXiv 2210.17323): weights are rounded column by column, the later ones making up for the earlier.

    Args:
        sim: is changed: weights, and their encodings are frozen.
        data: as for ``compute_encodings``; a few hundred samples.
        damping: added to the diagonal of the Gram matrix, in means of it.
        act_order: round the weights of the largest inputs first.
        options: see ``WalkOptions``.

    Raises: as ``apply_seq_mse``.
    """
    return apply_layerwise(sim, data, [GptqRounding(damping, act_order)], **options)


def apply_adaround(
    sim: Simulation, data: Data, *, iterations: int = 1000, through_activation: bool = False,
    **options: Unpack[WalkOptions],
) -> LayerwiseReport:
    """AdaRound (arXiv 2004.10568): every weight is rounded up or down, as is best for the output of its layer.

    Args:
        sim: is changed: weights, and their encodings are frozen.
        data: as for ``compute_encodings``; a few hundred samples.
        iterations: steps of its optimizer.
        through_activation: where a ReLU, GELU or the like follows, keep what it makes of the output (on a sample).
        options: see ``WalkOptions``.

    Raises: as ``apply_seq_mse``.
    """
    return apply_layerwise(sim, data, [AdaptiveRounding(iterations, through_activation=through_activation)], **options)


def correct_bias(sim: Simulation, data: Data, **options: Unpack[WalkOptions]) -> LayerwiseReport:
    """Bias correction: every output of a layer with a bias gets the mean it has in the float model.

    Args:
        sim: is changed: biases, and the encodings of the weights are frozen.
        data: as for ``compute_encodings``; a few hundred samples.
        options: see ``WalkOptions``.

    Raises: as ``apply_seq_mse``.
    """
    return apply_layerwise(sim, data, [BiasCorrection()], **options)


def apply_layerwise(
    sim: Simulation, data: Data, steps: Sequence[str | Step], **options: Unpack[WalkOptions]
) -> LayerwiseReport:
    """Several methods in one walk: each layer goes through all of them before the next layer is looked at.

    >>> qtk.apply_layerwise(sim, batches, ["seq_mse", "gptq", "bias_correction"])  # doctest: +SKIP

    Args:
        sim: is changed.
        data: as for ``compute_encodings``; a few hundred samples.
        steps: names, with settings if need be: ``seq_mse(num_candidates=50)``.
        options: see ``WalkOptions``.

    Raises: as ``apply_seq_mse``; ConfigError for an unknown step.
    """
    names = [steps] if isinstance(steps, str) else steps
    chosen = [step(each) if isinstance(each, str) else each for each in names]
    if not chosen:
        raise CalibrationError("no steps to apply; name at least one, e.g. 'seq_mse'")
    if not hasattr(sim, "quantizers"):
        raise CalibrationError(f"layer-wise methods improve a QuantSim, got {type(sim).__name__}; make one of it")
    _check_options(options)
    progress = options.get("progress", True)
    with torch.inference_mode(False), evaluating(sim.model), ExitStack() as stack:
        problem: Exception | None = None
        try:
            layers, skipped = _layers(sim, chosen, options.get("sites"))
            _load_missing_encodings(sim, layers, progress)
            quantizers = list(dict.fromkeys(sim.quantizers.values()))
            stack.enter_context(in_mode([q for q in quantizers if not q.ready], Mode.BYPASS))
            calls = _calls(sim.model, quantizers, data, options)
        except Exception as error:  # the other ranks are waiting
            problem = error
        agree(problem)
        _warn_of_earlier_calls(layers)
        results = _Run(sim, chosen, layers, calls, options).finish(progress)
    if not any(result.reason == "" for result in results):
        reasons = sorted({result.reason for result in results})
        raise CalibrationError(f"no layer was improved: {'; '.join(reasons)}")
    return LayerwiseReport(tuple(results), skipped)


def _check_options(options: WalkOptions) -> None:
    unknown = options.keys() - WalkOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"unknown option {unknown.pop()!r}; known: {', '.join(sorted(WalkOptions.__annotations__))}")
    for name, known in (("inputs", get_args(Inputs)), ("offload", get_args(Offload))):
        if options.get(name, known[0]) not in known:
            raise CalibrationError(f"{name} must be one of {', '.join(known)}, got {options[name]!r}")  # type: ignore[literal-required]


def _layers(
    sim: Simulation, steps: Sequence[Step], sites: Iterable[str] | str | None
) -> tuple[list[WeightedLayer], dict[str, str]]:
    """The layers to work on, and the named weights that are left as they are."""
    found, skipped = weighted_layers(sim.model, sim.plan)
    wanted = {site.name for site in leaders(sim.plan, sites)}
    layers = []
    for layer in found:
        reason = _reason_to_skip(layer, steps)
        if layer.name in wanted and reason:
            skipped[layer.name] = reason
        elif layer.name in wanted:
            layers.append(layer)
    skipped = {name: reason for name, reason in skipped.items() if name in wanted}
    if not layers:
        reasons = "".join(f"\n  {name}: {reason}" for name, reason in list(skipped.items())[:5])
        raise CalibrationError(f"no layer to work on: none of the {len(wanted)} sites is the weight of a matrix "
                               f"product or convolution{reasons}")
    return layers, skipped


def _reason_to_skip(layer: WeightedLayer, steps: Sequence[Step]) -> str:
    if layer.quantizer.frozen and any(isinstance(each, SeqMse) for each in steps):
        return "its encoding is frozen; sim.unfreeze(name) first"
    if layer.quantizer.learns_range:
        return "its range is being learned; fix_range() its quantizer first"
    if layer.bias is None and all(isinstance(each, BiasCorrection) for each in steps):
        return "it has no bias to correct"
    return next((reason for each in steps if (reason := each.refuses(layer.quantizer.spec))), "")


def _warn_of_earlier_calls(layers: Sequence[WeightedLayer]) -> None:
    """What an earlier call has rewritten is all there is left of the float model."""
    names = [layer.name for layer in layers if layer.quantizer.rewrote_weight]
    if names:
        warnings.warn(
            f"an earlier call rewrote the weights of {len(names)} layers ({names[0]}, …): they now count as the float "
            "model; put all steps into one apply_layerwise, on a simulation made anew", stacklevel=3,
        )


def _load_missing_encodings(sim: Simulation, layers: Sequence[WeightedLayer], progress: bool) -> None:
    missing = {layer.name for layer in layers if layer.quantizer.scale is None}
    sites = {site: decided for site, decided in sim.plan.items() if site.name in missing}
    for site, encoding in parameter_encodings(sim.model, sites, progress).items():
        sim.quantizers[site.name].load_encoding(encoding)


def _calls(
    model: nn.Module, quantizers: Sequence[Quantizer], data: Data, options: WalkOptions
) -> list[Call]:
    """The calls that the data make. A user's own way of calling may need what a call returns, so it runs."""
    forward = options.get("forward")
    run = forward is not None or not isinstance(data, Iterable)
    with recording(model, run=run) as calls, in_mode(quantizers, Mode.BYPASS):
        run_all(model, data, forward=forward, num_batches=options.get("num_batches"), label="reading",
                ended_by=() if run else (Recorded,))
    if not calls:
        raise CalibrationError("the data never call the model; pass batches, or a function that runs it")
    return calls


class _Run:
    """One walk with its checkpoints, bar and results."""

    def __init__(
        self, sim: Simulation, steps: Sequence[Step], layers: Sequence[WeightedLayer], calls: Sequence[Call],
        options: WalkOptions,
    ) -> None:
        self._steps = steps
        self._layers = layers
        self._device = device_of(sim.model)
        self._thin: list[str] = []
        inputs, directory = options.get("inputs", "asym"), options.get("checkpoint_dir")
        self._checkpoint: Checkpoint | None = None
        self._finished: frozenset[str] = frozenset()
        if directory is not None:
            names, settings = [layer.name for layer in layers], {"steps": repr(list(steps)), "inputs": inputs}
            data = [(call.args, call.kwargs) for call in calls]
            self._checkpoint = from_first(lambda: Checkpoint(directory, names, settings, sim.model, data))
            self._finished = from_first(lambda: self._checkpoint.finished if self._checkpoint else frozenset())
        wanted = {layer: None if layer.name in self._finished else _wanted(layer, steps) for layer in layers}
        self._walk = walk(sim.model, calls, wanted, inputs=inputs, offload=options.get("offload", "none"))

    def finish(self, progress: bool) -> list[LayerResult]:
        made: dict[str, tuple[Outputs, LayerUpdate]] = {}
        with tqdm(total=len(self._layers), desc="layers", unit="layer", disable=not progress) as bar:
            while (reached := self._next()) is not None:
                improvement = self._improvement(reached)
                if improvement is not None:
                    with uninterrupted():
                        improvement.write(reached.layer)
                    made[reached.layer.name] = reached.outputs, improvement
                    part = improvement.after / improvement.before if improvement.before > 0 else 0.0
                    bar.set_postfix_str(reached.layer.name + (f", loss x {part:.2f}" if part > 0 else ""))
                bar.update()
        if self._thin:
            warnings.warn(
                f"{len(self._thin)} layers saw fewer rows of data than twice their columns ({self._thin[0]}, …); GPTQ "
                "fits what is chance there: use more data, a larger damping, or adaround", stacklevel=3,
            )
        return [_result(layer.name, *made.get(layer.name, (None, None))) for layer in self._layers]

    def _next(self) -> LayerInput | None:
        """The next layer, with what the data of all ranks say of it."""
        problem: Exception | None = None
        reached: LayerInput | None = None
        try:
            reached = next(self._walk, None)
        except Exception as error:  # the other ranks are waiting
            problem = error
        moments = summed(None if reached is None else reached.moments, self._device, problem)
        return None if reached is None else replace(reached, moments=moments)

    def _improvement(self, reached: LayerInput) -> LayerUpdate | None:
        layer, moments, checkpoint = reached.layer, reached.moments, self._checkpoint
        if checkpoint is not None and layer.name in self._finished:
            return from_first(lambda: checkpoint.load(layer))
        if moments is None or not moments.rows:
            return None
        if moments.rows < 2 * moments.columns and any(isinstance(each, GptqRounding) for each in self._steps):
            self._thin.append(layer.name)

        def make() -> LayerUpdate:
            made = improved(layer, self._steps, moments)
            if checkpoint is not None:
                checkpoint.save(layer, made)
            return made

        return from_first(make)


def _wanted(layer: WeightedLayer, steps: Sequence[Step]) -> Wanted:
    """What all steps together must know."""
    encoding = layer.quantizer.encoding
    assert encoding is not None
    owner = owner_of(layer.weight.shape, encoding, layer.geometry)
    block = block_of(owner)
    own = [step.wants(None if block == owner.shape[-1] else block) for step in steps]
    blocks = {wanted.block for wanted in own}
    return Wanted(
        blocks.pop() if len(blocks) == 1 else None, difference=any(wanted.difference for wanted in own),
        sample=max(wanted.sample for wanted in own), gram=any(wanted.gram for wanted in own),
    )


def _result(name: str, outputs: Outputs | None, made: LayerUpdate | None) -> LayerResult:
    if made is None or outputs is None:
        return LayerResult(name, reason="no data reached it")
    seen = (outputs.signal, outputs.noise) if outputs.signal else (None, None)
    return LayerResult(name, made.before, made.after, *seen)
