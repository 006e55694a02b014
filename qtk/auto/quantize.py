"""Quantizes a model to a demanded accuracy: what helps is kept, cheap things are tried first."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from tqdm import tqdm

from qtk.analysis.float_outputs import FloatOutputs, sqnr_db
from qtk.auto.budget import Budget, Limits
from qtk.auto.choices import Choices
from qtk.auto.latency import WholeLatency
from qtk.auto.metric import Evaluate, Metric
from qtk.auto.promise import Promise
from qtk.auto.ranking import Ranking
from qtk.auto.token_metric import token_metric
from qtk.auto.trial_builder import TrialBuilder
from qtk.auto.trial_log import Measured, TrialLog
from qtk.auto.trial_order import DYNAMIC, FEW_BITS, trial_order
from qtk.calls.states import set_states
from qtk.capture.prepared_model import PreparedModel
from qtk.config.load import load_config
from qtk.config.schema import QuantConfig
from qtk.core.width import FROM_CONFIG, FromConfig, Width, width_to_json
from qtk.data.batch_sizes import example_of
from qtk.data.forward_pass import Batch, Forward, in_memory
from qtk.data.labels import without_labels
from qtk.data.sequences import Sequences, apart, begins
from qtk.data.valid_tokens import Valid
from qtk.errors import OUT_OF_MEMORY, CalibrationError, QtkError, first_line
from qtk.graph.footprint import footprint
from qtk.public import public
from qtk.quantsim import QuantSim
from qtk.report.account import Account, Trial
from qtk.torch_private import pytree
from qtk.workflow.prepare import ExampleInputs, prepare_own

SEARCHED = 0.5
"""The share of the time limit after which only precise sites, and dynamic quantization, are tried."""

LEFT_OUT = "left out: half of the time is over, and precise sites lose least"


class Quantized(NamedTuple):
    """Holds a calibrated simulation, and the account of how its settings were found."""

    sim: QuantSim
    account: Account


@public
def quantize(
    model: nn.Module, data: Iterable[Batch], *, target: str | Path | Mapping[str, object] | QuantConfig = "onnxruntime",
    evaluate: Evaluate | Literal["perplexity", "kl"] | None = None, max_drop: float = 0.01, confidence: float = 0.95,
    labels: Tensor | None = None, example_inputs: ExampleInputs | None = None,
    weight_bits: Width = FROM_CONFIG, activation_bits: Width = FROM_CONFIG, scheme: str = "min_max",
    forward: Forward | None = None, num_batches: int | None = None, holdout: float = 0.2,
    valid: Valid | None = None, time_limit: float | None = None,
    directory: str | os.PathLike[str] | None = None, progress: bool = True,
    states: Mapping[str, int | str] = MappingProxyType({}),
    budget: Limits = MappingProxyType({}),
) -> Quantized:
    """Quantizes ``model`` until what it loses is at most ``max_drop``, by the cheapest means that reach it.

    >>> import qtk, torch
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)).eval()
    >>> batches = [torch.randn(32, 16) for _ in range(5)]
    >>> sim, account = qtk.quantize(model, batches, weight_bits=4, progress=False)
    >>> account.reached
    True
    >>> print(account)  # doctest: +ELLIPSIS
    drop of output error, at most 0.01 asked
     tried ...

    With a metric, for which higher is better, and which should see data of its own:

    >>> def fraction_positive(model):
    ...     return float((model(torch.ones(8, 16)) > 0).float().mean())
    >>> sim, account = qtk.quantize(model, batches, evaluate=fraction_positive, max_drop=0.0, progress=False)

    A metric that gives a score from 0 to 1 for each sample, in the same order each time, lets ``max_drop`` hold with
    95 % confidence for samples that nobody has seen (``qtk.auto.promise``): a quarter of the samples is for the
    search, the others judge what it proposes.

    >>> unseen = torch.randn(1200, 16)
    >>> wanted = model(unseen).argmax(1)
    >>> def is_right(model):
    ...     return model(unseen).argmax(1) == wanted
    >>> sim, account = qtk.quantize(model, batches, evaluate=is_right, max_drop=0.05, labels=wanted, progress=False)
    >>> account.reached, account.best.bound < 0.05
    (True, True)
    >>> print(account.end)  # doctest: +ELLIPSIS, +NORMALIZE_WHITESPACE
    reached by min_max, about ... × float ms: the drop is at most 0.0... with a confidence of 0.95, by 900 samples the
    search has not seen

    What costs nothing at run time is tried first: plain calibration, ranges without outliers, equalization,
    SmoothQuant, layer-wise methods. Then, in the order of the time that the target's runtime is estimated to take
    with each (``qtk.auto.run_time``), the sites that lose most, up to half of all, are left in 16 bits, or in float
    where the target has no fast kernels for them, then the sites that lose most alone, until one is left
    (``qtk.auto.ranking``); and for a shipped target whose runtime quantizes activations at run time as well, that is
    tried with 8 bits, second and measured beside plain calibration where it takes about the same time. A step is kept
    if the error of the outputs falls on batches that calibration does not see, and the metric with it does not.

    Args:
        model: a float model, or a prepared one; it stays as it is.
        data: batches to calibrate with, a few hundred samples; the last ``holdout`` of them judge.
        target: a shipped target, or a config's path.
        evaluate: from a model to its metric; ``None``: the drop is the error of the outputs on the held-out batches,
            Σ (simulated - float)² / Σ float², so that 0.01 is an SQNR of 20 dB. Of language models ``perplexity`` on
            the held-out batches, or ``kl``, the divergence of their distributions from the float model's in nats per
            token; by how much these rise is the drop.
        max_drop: the drop of the metric that is small enough.
        confidence: with which the drop is at most ``max_drop``, where ``evaluate`` gives scores per sample.
        labels: the classes of these samples, [samples]: the account has the drop of each class.
        example_inputs: inputs the model runs on; ``None``: a batch, which needs ``forward=None``. Sizes in which
            batches differ may vary, of sentences and images too.
        weight_bits: width of weights, as for ``QuantSim``.
        activation_bits: width of activations, as for ``QuantSim``.
        scheme: how ranges are found at first.
        forward: how to run the model on a batch, e.g. ``lambda model, batch: model(batch[0])``.
        num_batches: batches to take of the data; they are kept in memory.
        holdout: fraction of the batches that judge, at least one.
        valid: which tokens count, as for ``compute_encodings``: in ranges, layer-wise methods and the error of the
            outputs; ``evaluate`` says itself what counts.
        time_limit: seconds after which no further trial begins; after half of them, all steps are left out but dynamic
            quantization and precise sites.
        directory: where finished trials are noted, so that the same call resumes a run that was stopped.
        progress: show a bar.
        states: inputs that are outputs of the call before, as for ``QuantSim``; of ``qtk.Sequences`` whole ones judge.
        budget: what no setting may exceed: ``{"bytes": 2e6}`` of parameters, ``{"milliseconds": 4.0}`` of a call in
            the target's runtime, else in ONNX Runtime, on this machine; what would be kept is exported and measured.

    Returns: the best simulation found, and the account of all trials, printable.

    Raises: CalibrationError for fewer than two batches or sequences, outputs that are not finite, or if ``evaluate``
        fails on the float model; ConfigError for an unknown target, states that do not fit, or a directory of another
        run. A trial that fails, in ``evaluate`` too, is noted in the account, and the others go on.
    """
    if not 0 < holdout < 1:
        raise CalibrationError(f"holdout is a fraction of the batches, above 0 and below 1, got {holdout}")
    if math.isnan(max_drop):
        raise CalibrationError("max_drop is a number, got nan")
    if labels is not None and evaluate is None:
        raise CalibrationError("labels are of the samples that evaluate scores; pass evaluate too, or leave them out")
    config = load_config(target)
    batches = in_memory(data, num_batches, least=2, why="calibration does not see the last")
    calibration, held_out = apart(batches, holdout)
    if example_inputs is None and forward is not None:
        raise CalibrationError("with forward, say example_inputs too: a tensor, tuple or dict the model runs on")
    given = [] if example_inputs is None else [example_inputs]
    every = [*given, *(without_labels(model, each) for each in (batches if forward is None else ()))]
    example, shapes = example_of(every)
    inputs = cast(ExampleInputs, example)
    is_prepared = isinstance(model, PreparedModel)
    prepared = prepare_own(model, inputs, in_place=not states, dynamic_shapes="batch" if is_prepared else shapes)
    set_states(prepared, states)
    builder = TrialBuilder(prepared, inputs, config, weight_bits, activation_bits, calibration, forward, valid,
                           _dynamic(config, weight_bits, activation_bits))
    judge = FloatOutputs(prepared, held_out, forward, valid)
    if isinstance(evaluate, str):
        evaluate = token_metric(evaluate, prepared, list(held_out), forward, valid)
    name = "output error" if evaluate is None else getattr(evaluate, "__name__", "the metric")
    metric = None if evaluate is None else Metric.of(evaluate, prepared, max_drop, confidence, labels)
    settings = {
        "config": config.model_dump(mode="json"), "weight_bits": width_to_json(weight_bits), "valid": _named(valid),
        "activation_bits": width_to_json(activation_bits), "batches": len(batches), "held_out": len(held_out),
        "metric": name, "metric in float": f"{math.nan if metric is None else metric.in_float:.6g}", "scheme": scheme,
        "outputs": f"{judge.power:.4e}", "samples": None if metric is None else metric.samples,
        "data": f"{_sum(list(batches)):.4e}", "states": dict(states),
    } | ({"sequences": begins(batches)} if isinstance(batches, Sequences) else {})
    log = TrialLog(None if directory is None else Path(directory), settings)
    limit = math.inf if time_limit is None else time_limit
    account = Account(name, max_drop, confidence=None if metric is None or metric.promise is None else confidence)
    run = _Run(builder, judge, metric, account, time.monotonic(), limit, log, Budget(budget, prepared, inputs))
    return run.finish(Choices(scheme), progress=progress)


@dataclass(slots=True)
class _Run:
    """The state of one run.

    ``judge`` and ``metric``: what a trial is judged by, the second if there is one.
    ``begun``, ``time_limit``: of ``time.monotonic``, in seconds.
    ``unranked``: choices whose sites cannot be ranked.
    """

    builder: TrialBuilder
    judge: FloatOutputs
    metric: Metric | None
    account: Account
    begun: float
    time_limit: float
    log: TrialLog
    budget: Budget
    best: Choices | None = None
    error: float = math.inf
    drop: float = math.inf
    sim: QuantSim | None = None
    unranked: set[Choices] = field(default_factory=set)

    @property
    def promise(self) -> Promise | None:
        """Returns what holds the drop, where there are scores per sample."""
        return None if self.metric is None else self.metric.promise

    def finish(self, first: Choices, *, progress: bool) -> Quantized:
        """Tries until the drop is met, nothing is left, or the time is over."""
        late = False
        steps = itertools.chain(
            [("plain calibration", first)],
            trial_order(lambda: self.best or first, lambda: self._ranked(self.best or first), self._price,
                   dynamic=self.builder.dynamic is not None, few_bits=all(
                       isinstance(bits, int) and bits <= FEW_BITS
                       for bits in (self.builder.weight_bits, self.builder.activation_bits)))
        )
        for step, choices in tqdm(steps, desc="trying", unit="trial", disable=not progress):
            if self.account.trials and self._is_over():  # ranking and run times took the rest
                late = True
                break
            if self._leaves_out(step, choices):
                self.account.trials.append(Trial(step, 0.0, reason=LEFT_OUT))
                continue
            self._try(step, choices)
            late = self._is_over()
            if self._is_done() or late:
                break
        if self.best is None:
            raise CalibrationError("no trial gives a simulation:\n  " + "\n  ".join(
                f"{trial.step}: {trial.reason}" for trial in self.account.trials))
        self._judge_last()
        self.account.end = self._ended(late=late)
        return Quantized(self.sim or self.builder.simulation(self.best), self.account)

    def _is_done(self) -> bool:
        """Says whether the drop is met: as promised, or as measured where the samples are too few for any promise."""
        best = self.account.best
        if self.promise is None or self.promise.is_possible or best is None or best.drop is None:
            return self.account.reached
        return best.drop <= self.account.max_drop

    def _price(self, choices: Choices) -> float:
        """As ``TrialBuilder.price``; inf when the time is over, since no trial begins then."""
        return math.inf if self._is_over() else self.builder.price(choices)

    def _is_over(self, share: float = 1.0) -> bool:
        """Says whether this share of the time limit is over."""
        return time.monotonic() - self.begun > share * self.time_limit

    def _leaves_out(self, step: str, choices: Choices) -> bool:
        """Says whether the trial would take the time of trials with precise sites, which lose least."""
        is_last_resort = step == DYNAMIC or choices.precise or self.best is None or self.log.find(choices) is not None
        return not is_last_resort and self._is_over(SEARCHED)

    def _try(self, step: str, choices: Choices) -> None:
        before, measured, sim = self.sim, self.log.find(choices), None
        if measured is None:
            measured, sim = self._measured(step, choices)
            self.log.add(choices, measured)
        error, drop, latency_ms = measured.error, measured.drop, None
        reason = measured.failure
        if error is not None and (drop is None or not error < self.error):
            reason = "the error of the outputs does not fall"
        elif drop is not None and drop > self.drop:
            reason = f"{self.account.metric} falls"
        if reason is None:
            latency_ms = self.budget.milliseconds(lambda: sim or self.builder.simulation(choices))
            reason = self.budget.exceeded(measured.size_bytes, latency_ms)
        if reason is None and error is not None and drop is not None:
            self.best, self.error, self.drop, self.sim = choices, error, drop, sim
        shown, bound = None if error is None else sqnr_db(error), None
        if reason is None and self.promise is not None and drop is not None and drop <= self.account.max_drop:
            scores = _tensor(measured.scores)
            bound = self.promise.bound(scores) if self.promise.is_promising(scores) else None
        self.account.trials.append(Trial(step, measured.seconds, shown, drop, reason is None, reason,
                                         measured.size_bytes, latency_ms, measured.run_time, bound))
        if choices.dynamic and step == DYNAMIC and before is not None and sim is not None:
            self._time(before, sim)

    def _judge_last(self) -> None:
        """Notes the bound on the drop of the best trial, if it was not judged, and its drop by class."""
        if self.promise is None or self.best is None:
            return
        trials, measured = self.account.trials, self.log.find(self.best)
        assert measured is not None
        scores, index = _tensor(measured.scores), max(at for at, trial in enumerate(trials) if trial.kept)
        if trials[index].bound is None:
            trials[index] = replace(trials[index], bound=self.promise.bound(scores))
        self.account.needed = self.promise.samples_needed(scores)
        if self.metric is not None and self.metric.labels is not None:
            self.account.classes = tuple(self.promise.drops_by_class(scores, self.metric.labels))

    def _measured(self, step: str, choices: Choices) -> tuple[Measured, QuantSim | None]:
        """The result of a trial, and its simulation unless it failed."""
        begun = time.monotonic()
        error = drop = sim = size = run_time = scores = None
        failure = None
        try:
            sim = self.builder.simulation(choices)
            size = footprint(sim.model).quantized_bytes
            run_time = self.builder.price(choices, sim)
            error = self.judge.error(sim.model)
            if self.metric is None:
                drop = error
            elif error < self.error:
                drop, scores = self.metric.drop(sim.model, step)
        except OUT_OF_MEMORY:
            raise
        except Exception as raised:  # whatever a method, or a user's function, raises: others may do
            error = drop = sim = size = run_time = scores = None
            failure = f"failed: {first_line(raised)}"
        return Measured(time.monotonic() - begun, error, drop, failure, size, run_time, scores), sim

    def _time(self, before: QuantSim, dynamic: QuantSim) -> None:
        """Notes how long a call of both takes in the runtime of the target, if it can be measured here."""
        try:
            whole = WholeLatency(self.builder.model, self.builder.example_inputs)
            ratio = whole.ratio(before, progress=False) * whole.ratio(dynamic, progress=False)
        except QtkError:  # the runtime is not installed, or a model of several files
            return
        trials = self.account.trials
        kept = max(index for index, trial in enumerate(trials[:-1]) if trial.kept)
        for index, factor in ((kept, 1.0), (len(trials) - 1, ratio)):
            trials[index] = replace(trials[index], latency_ms=factor * whole.first_ms)

    def _ranked(self, choices: Choices) -> Ranking:
        """The sites that can be left precise beside these choices; none if they cannot be ranked."""
        choices = replace(choices, layerwise=(), precise=())  # with the float weights
        ranking = self.log.ranking(choices)
        if ranking is None and choices not in self.unranked:
            begun = time.monotonic()
            try:
                ranking = self.builder.ranking(choices)
            except OUT_OF_MEMORY:
                raise
            except Exception as raised:  # what a model, or a user's forward, raises under gradients
                reason = f"failed: {first_line(raised)}"
                self.account.trials.append(Trial("ranking the sites", time.monotonic() - begun, reason=reason))
                self.unranked.add(choices)
            else:
                self.log.add_ranking(choices, ranking)
        return ranking or Ranking((), {})

    def _ended(self, *, late: bool) -> str:
        best = self.account.best
        assert best is not None
        assert best.drop is not None
        promised, count = "", 0 if self.promise is None else self.promise.judges
        found = str(self.best) if best.run_time is None else f"{self.best}, about {best.run_time:.2f} × float ms"
        if best.bound is not None:
            promised = (f": the drop is at most {best.bound:.4g} with a confidence of {self.account.confidence:g}, by "
                        f"{count} samples the search has not seen")
        if self.account.reached:
            return f"reached by {found}{promised}"
        if best.bound is not None and best.drop <= self.account.max_drop:
            needed = "" if self.account.needed is None else (
                f"; about {self.account.needed} samples, scored by evaluate, would show {self.account.max_drop:g}")
            return f"not promised, {best.drop:.4g} measured where the search looks, by {found}{promised}{needed}"
        why = "the time is over" if late else "nothing else is left to try"
        return (f"not reached, {why}; the least drop is {best.drop:.4g}, by {found}{promised}; give more bits, a "
                "larger max_drop, more data, or train the simulation (docs/qat.md)")


def _dynamic(config: QuantConfig, weight_bits: Width, activation_bits: Width) -> QuantConfig | None:
    """The config of the same runtime that quantizes activations at run time; ``None`` where the config is one's own."""
    name = None if config.runtime is None else config.runtime.dynamic
    widths = {width for width in (weight_bits, activation_bits) if not isinstance(width, FromConfig)}
    if name is None or not widths <= {8} or config != load_config(config.runtime.target):  # type: ignore[union-attr]
        return None
    return load_config(name)


def _tensor(scores: list[float] | None) -> Tensor:
    return torch.tensor(scores, dtype=torch.float64)


def _named(valid: Valid | None) -> str:
    if isinstance(valid, str):
        return valid
    return getattr(valid, "__qualname__", type(valid).__name__) if valid is None or callable(valid) else repr(valid)


def _sum(batches: list[Batch]) -> float:
    """The sum of the sizes of all elements, which tells data apart."""
    tensors = [leaf for leaf in pytree.tree_leaves(batches) if isinstance(leaf, Tensor)]
    return sum(float(tensor.double().abs().sum()) for tensor in tensors)
