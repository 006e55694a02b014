"""Builds the simulation of a trial: transformed, calibrated, improved."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from qtk.analysis.sensitivity import sensitivity
from qtk.auto.choices import Choices
from qtk.auto.ranking import Ranking
from qtk.auto.run_time import RunTime
from qtk.auto.site_rules import SiteRules
from qtk.capture.prepared_model import PreparedModel
from qtk.config.schema import QuantConfig
from qtk.config.tensor_setting import TensorSetting
from qtk.core.width import Width
from qtk.data.forward_pass import Batch, Forward, run_batch
from qtk.data.sequences import like
from qtk.data.valid_tokens import Valid
from qtk.errors import CalibrationError, QtkError
from qtk.layerwise.layer_selection import select_layers
from qtk.layerwise.methods import method
from qtk.quantsim import QuantSim
from qtk.workflow.layerwise import apply_layerwise
from qtk.workflow.prepare import ExampleInputs
from qtk.workflow.transforms import transform


@dataclass(frozen=True, slots=True)
class TrialBuilder:
    """What all trials have in common.

    Args:
        model: the prepared model, which stays as it is.
        example_inputs: inputs it runs on.
        config: the configuration of the target.
        dynamic: the target of the same runtime that quantizes activations at run time; ``None`` if there is none.
        weight_bits: width of weights.
        activation_bits: width of activations.
        batches: the data to calibrate with.
        forward: how to run a model on a batch.
        valid: which tokens count.
    """

    model: PreparedModel
    example_inputs: ExampleInputs
    config: QuantConfig
    weight_bits: Width
    activation_bits: Width
    batches: Iterable[Batch]
    forward: Forward | None = None
    valid: Valid | None = None
    dynamic: QuantConfig | None = None
    _run_times: RunTime = field(init=False)
    _prices: dict[tuple[bool, tuple[str, ...]], float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        runtime = self.config.runtime
        object.__setattr__(self, "_run_times", RunTime(None if runtime is None else runtime.kernels))

    def simulation(self, choices: Choices) -> QuantSim:
        """The simulation with these settings. Raises: QtkError if one of them cannot be applied."""
        sim = self._planned(choices.scheme, self._config(choices))
        for name in choices.transforms:
            transform(name).apply(sim, self.batches, forward=self.forward, progress=False, valid=self.valid)
        sim.compute_encodings(self.batches, forward=self.forward, valid=self.valid, progress=False)
        if choices.layerwise and (not choices.precise or _has_layers(sim, choices.layerwise)):
            apply_layerwise(sim, self.batches, choices.layerwise, forward=self.forward, valid=self.valid,
                            progress=False)
        return sim

    def ranking(self, choices: Choices) -> Ranking:
        """The sites that can be left precise. Where the simulation loses too much for a loss, estimates rank them.

        Raises: CalibrationError if the outputs have no gradient.
        """
        names = SiteRules(self._planned(choices.scheme, self._base(choices)).simulation).names()
        simulation = self.simulation(choices).simulation
        measure = partial(sensitivity, simulation, self.batches, forward=self.forward, valid=self.valid, progress=False)
        try:
            rows = measure()
        except CalibrationError:  # the logarithm of what was rounded to 0
            rows = measure(top=0)
        return Ranking.of(rows, names)

    def price(self, choices: Choices, sim: QuantSim | None = None) -> float:
        """About how long a call takes over float's with these settings, see ``RunTime``; inf if they cannot be built.

        Ranges and rounding change nothing of it, so that one batch calibrates. It is 1 of a model without floats.

        Args:
            choices: the settings.
            sim: a simulation with them; ``None``: one is made.
        """
        key = choices.dynamic, choices.precise
        if key not in self._prices:
            run, batch = run_batch if self.forward is None else self.forward, next(iter(self.batches))
            try:
                made = sim or self._planned("min_max", self._config(choices))
                if sim is None:
                    made.compute_encodings(like(self.batches, [batch]), forward=self.forward, valid=self.valid,
                                           progress=False)
                ratio = self._run_times.ratio(made.simulation, lambda: run(made.model, batch))
            except QtkError:  # whose reason the trial tells
                ratio = math.inf
            self._prices[key] = 1.0 if ratio is None else ratio
        return self._prices[key]

    def _base(self, choices: Choices) -> QuantConfig:
        return self.config if not choices.dynamic or self.dynamic is None else self.dynamic

    def _config(self, choices: Choices) -> QuantConfig:
        base = self._base(choices)
        if not choices.precise:
            return base
        rules = SiteRules(self._planned(choices.scheme, base).simulation)
        return rules.precise(base, choices.precise,
                             base.precise if base.precise == "float" else TensorSetting(bits=base.precise))

    def _planned(self, scheme: str, config: QuantConfig) -> QuantSim:
        return QuantSim(self.model, self.example_inputs, scheme=scheme, weight_bits=self.weight_bits,
                        activation_bits=self.activation_bits, config=config)


def _has_layers(sim: QuantSim, methods: Sequence[str]) -> bool:
    """Says whether layer-wise methods have a layer to work on: precise sites may have left none."""
    try:
        select_layers(sim.simulation, [method(name) for name in methods], None)
    except CalibrationError:
        return False
    return True
