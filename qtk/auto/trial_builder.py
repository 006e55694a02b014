"""Builds the simulation of a trial: transformed, calibrated, improved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from qtk.auto.choices import Choices
from qtk.auto.site_rules import SiteRules
from qtk.capture.prepared_model import PreparedModel
from qtk.config.schema import QuantConfig
from qtk.config.tensor_setting import TensorSetting
from qtk.core.width import Width
from qtk.quantsim import QuantSim
from qtk.workflow.forward_pass import Batch, Forward
from qtk.workflow.layerwise import apply_layerwise
from qtk.workflow.prepare import ExampleInputs
from qtk.workflow.sensitivity import sensitivity
from qtk.workflow.transforms import transform
from qtk.workflow.valid_tokens import Valid


@dataclass(frozen=True, slots=True)
class TrialBuilder:
    """What all trials have in common.

    Args:
        model: the prepared model, which stays as it is.
        example_inputs: inputs it runs on.
        config: the configuration of the target.
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
    batches: Sequence[Batch]
    forward: Forward | None = None
    valid: Valid | None = None

    def simulation(self, choices: Choices) -> QuantSim:
        """The simulation with these settings. Raises: QtkError if one of them cannot be applied."""
        sim = self._planned(choices.scheme, self._config(choices))
        for name in choices.transforms:
            transform(name).apply(sim, self.batches, forward=self.forward, progress=False)
        sim.compute_encodings(self.batches, forward=self.forward, valid=self.valid, progress=False)
        if choices.layerwise:
            apply_layerwise(sim, self.batches, choices.layerwise, forward=self.forward, valid=self.valid,
                            progress=False)
        return sim

    def ranking(self, choices: Choices) -> list[str]:
        """The names of the sites that can be left precise, the one that the outputs gain most by first.

        Those that were not measured go by the estimate of what they cost alone; those that cost nothing are left out.
        """
        sites = {site.name for site in SiteRules(self._planned(choices.scheme, self.config).simulation).sites}
        rows = sensitivity(self.simulation(choices).simulation, self.batches, forward=self.forward, valid=self.valid,
                           progress=False)
        gains = {row.name: row.increase if math.isnan(row.recovery) else row.recovery for row in rows}
        return sorted((name for name in gains if name in sites and gains[name] > 0), key=lambda name: -gains[name])

    def _config(self, choices: Choices) -> QuantConfig:
        if not choices.precise:
            return self.config
        precise = self.config.precise
        rules = SiteRules(self._planned(choices.scheme, self.config).simulation)
        sites = [site for site in rules.sites if site.name in choices.precise]
        return rules.config(self.config, sites, precise if precise == "float" else TensorSetting(bits=precise))

    def _planned(self, scheme: str, config: QuantConfig) -> QuantSim:
        return QuantSim(self.model, self.example_inputs, scheme=scheme, weight_bits=self.weight_bits,
                        activation_bits=self.activation_bits, config=config)
