"""Bias correction: the mean of every output stays what it is in the float model."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from qtk.algorithms.bias_correction import bias_correction
from qtk.core.spec import QuantSpec
from qtk.layerwise.layer_state import LayerState
from qtk.layerwise.second_moments import Wanted


@dataclass(frozen=True, slots=True)
class BiasCorrection:
    """Adds to the bias what the quantized weight and input take from the mean output; layers without one stay."""

    def wants(self, block: int | None) -> Wanted:
        return Wanted(block, gram=False)

    def refuses(self, spec: QuantSpec) -> str:
        return ""

    def apply(self, problem: LayerState) -> LayerState:
        if problem.bias is None:
            return problem
        exact = replace(problem, dtype=torch.float64)
        shift = bias_correction(
            exact.matrix(problem.original), exact.matrix(problem.simulated()), problem.moments.mean,
            problem.moments.mean_difference,
        )
        before = problem.error_now() if problem.loss is None else problem.loss[1]
        first = before if problem.loss is None else problem.loss[0]
        gain = problem.moments.rows * float(shift.square().sum())  # what a mean takes of a sum of squares
        bias = (problem.bias + shift.to(problem.bias.device)).to(problem.bias.dtype)
        return replace(problem, bias=bias, loss=(first, before - gain))
