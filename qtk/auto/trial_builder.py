"""Builds the simulation of a trial: transformed, calibrated, improved."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from qtk.analysis.sensitivity import sensitivity
from qtk.auto.choices import Choices
from qtk.auto.matrix_products import matrix_products
from qtk.auto.site_rules import SiteRules
from qtk.auto.widths import FLOAT_BITS
from qtk.capture.prepared_model import PreparedModel
from qtk.config.schema import QuantConfig
from qtk.config.tensor_setting import TensorSetting
from qtk.core.width import Width
from qtk.data.forward_pass import Batch, Forward, run_batch
from qtk.data.valid_tokens import Valid
from qtk.operators.lookup import row_of
from qtk.operators.op_row import Product
from qtk.quantsim import QuantSim
from qtk.workflow.layerwise import apply_layerwise
from qtk.workflow.prepare import ExampleInputs
from qtk.workflow.transforms import transform

MOST = 0.9
"""The share of the multiplications in integers that dynamic quantization must keep to be tried early."""


@dataclass(frozen=True, slots=True)
class TrialBuilder:
    """What all trials have in common.

    Args:
        model: the prepared model, which stays as it is.
        example_inputs: inputs it runs on.
        config: the configuration of the target.
        dynamic: the one of the same runtime that quantizes activations at run time; ``None`` if there is none.
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

    def simulation(self, choices: Choices) -> QuantSim:
        """The simulation with these settings. Raises: QtkError if one of them cannot be applied."""
        sim = self._planned(choices.scheme, self._config(choices))
        for name in choices.transforms:
            transform(name).apply(sim, self.batches, forward=self.forward, progress=False, valid=self.valid)
        sim.compute_encodings(self.batches, forward=self.forward, valid=self.valid, progress=False)
        if choices.layerwise:
            apply_layerwise(sim, self.batches, choices.layerwise, forward=self.forward, valid=self.valid,
                            progress=False)
        return sim

    def ranking(self, choices: Choices) -> list[str]:
        """The names of the sites that can be left precise, the one that the outputs gain most by first.

        Those that were not measured go by the estimate of what they cost alone; those that cost nothing are left out.
        """
        names = SiteRules(self._planned(choices.scheme, self._base(choices)).simulation).names()
        rows = sensitivity(self.simulation(choices).simulation, self.batches, forward=self.forward, valid=self.valid,
                           progress=False)
        gains: dict[str, float] = {}
        for row in rows:
            if (name := names.get(row.name)) is not None:
                gain = row.increase if math.isnan(row.recovery) else row.recovery
                gains[name] = max(gain, gains.get(name, 0.0))
        return sorted((name for name in gains if gains[name] > 0), key=lambda name: -gains[name])

    def keeps_integers(self, sim: QuantSim) -> bool:
        """Whether dynamic quantization computes in integers nearly all that ``sim`` does, of this target.

        It leaves convolutions, and products of two activations, in float.
        """
        run = run_batch if self.forward is None else self.forward
        in_both = in_plan = 0
        for product in matrix_products(sim.simulation, lambda: run(sim.model, next(iter(self.batches)))):
            data, other = product.operands
            if data is not None and other is not None:
                row = row_of(product.node)
                assert row is not None
                is_kept = sim.plan[other].static and row.product not in (Product.CONV, Product.CONV_TRANSPOSE)
                in_plan += product.multiplications
                in_both += product.multiplications if is_kept else 0
        return in_both >= MOST * in_plan

    def relative_cost(self, sim: QuantSim) -> float | None:
        """About how long the matrix products of ``sim`` take over those in float; ``None`` of a model without any.

        A product counts by its multiplications and the bits of its wider operand, 32 of one that is not quantized and 8
        at least: runtimes have no faster kernels for fewer.
        """
        run = run_batch if self.forward is None else self.forward
        cost = in_float = 0.0
        for product in matrix_products(sim.simulation, lambda: run(sim.model, next(iter(self.batches)))):
            bits = [FLOAT_BITS if site is None else sim.plan[site].spec.dtype.bits for site in product.operands]
            in_float += FLOAT_BITS * product.multiplications
            cost += max(8, *bits) * product.multiplications
        return cost / in_float if in_float else None

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
