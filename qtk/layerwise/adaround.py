"""AdaRound on a layer: learns for every weight whether it is rounded up or down."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from qtk.algorithms.adaround import RoundingDescent, adaround
from qtk.algorithms.coordinate_descent import coordinate_descent
from qtk.algorithms.output_error import ActivationError
from qtk.core.bounds import check_count
from qtk.core.dtypes import FloatDtype
from qtk.core.spec import QuantSpec
from qtk.errors import CalibrationError
from qtk.layerwise.gptq import Gptq
from qtk.layerwise.layer_state import LayerState
from qtk.moments.required_statistics import RequiredStatistics
from qtk.public import public

MOST_ITERATIONS = 1_000_000
REHEARSED = 4
"""The part of the iterations that tells which prior is best."""
SAMPLE_ROWS = 2048
"""Rows of input on which the error after the activation function is measured."""


@public
@dataclass(frozen=True, slots=True)
class AdaRound:
    """AdaRound (arXiv 2004.10568): learns to round each weight up or down.

    The encoding is the present one, or that which GPTQ chooses for weights of at most 4 bits.

    Each output takes the result of coordinate descent, from GPTQ's weights or an earlier method's, if the error of this
    result is lower.

    Args:
        iterations: steps of Adam, at most a million; a prior (``qtk.layerwise.candidates``) is chosen by a quarter.
        learning_rate: of Adam.
        regularization: weight of the term that drives choices to 0 or 1; the output error is counted in units of what
            rounding one weight to nearest costs.
        warm_start: fraction of the iterations without regularization.
        through_activation: where a ReLU, GELU or the like alone reads the output, minimize the error after it, on a
            sample of rows.

    Raises: CalibrationError if a setting is out of range.
    """

    needs_bias: ClassVar[bool] = False
    searches_scale: ClassVar[bool] = False

    iterations: int = 100
    learning_rate: float = 0.05
    regularization: float = 5.0
    warm_start: float = 0.2
    through_activation: bool = False

    def __post_init__(self) -> None:
        check_count("iterations of AdaRound", self.iterations, MOST_ITERATIONS)
        is_finite = 0 < self.learning_rate < math.inf and math.isfinite(self.regularization)
        if not is_finite or not 0 <= self.warm_start < 1:
            raise CalibrationError("AdaRound needs a finite learning_rate > 0, a finite regularization and "
                                   f"0 ≤ warm_start < 1; got {self}")

    def min_rows(self, columns: int) -> int:
        return 0

    def refuses(self, spec: QuantSpec) -> str | None:
        is_float = isinstance(spec.dtype, FloatDtype)
        return f"AdaRound needs codes that are integers, not {spec.dtype}" if is_float else None

    def required_statistics(self, block: int | None) -> RequiredStatistics:
        return RequiredStatistics(sample_rows=SAMPLE_ROWS if self.through_activation else 0)

    def apply(self, state: LayerState) -> LayerState:
        activation_error = self._activation_error(state) if self.through_activation else None
        start = state if state.is_rounded else Gptq().apply(state)
        state = replace(state, encoding=start.encoding)
        weight, grid = state.to_gemm(state.float_weight)[:, None], state.grid()[:, None]
        iterations = max(1, self.iterations // REHEARSED) if state.rehearses else self.iterations
        descent = RoundingDescent(iterations, self.learning_rate, self.regularization, self.warm_start)
        rounded = adaround(weight, grid, state.error, activation_error, descent)
        descended = coordinate_descent(
            weight[:, 0], state.to_gemm(start.simulated_weight()), state.grid(), state.error
        )[:, None]
        objective = activation_error or state.error
        is_better = objective.of(weight - rounded) <= objective.of(weight - descended)
        return state.updated(weight=torch.where(is_better[..., None], rounded, descended)[:, 0])

    def _activation_error(self, state: LayerState) -> ActivationError | None:
        if state.activation is None:
            return None
        rows, input_error = (sample.to(state.dtype)[:, None] for sample in state.moments.sample)
        weight = state.to_gemm(state.float_weight)[:, None]
        product = rows @ weight.mT
        float_output, unrounded_output = (
            product if bias is None else product + bias.to(state.dtype).reshape(len(rows), 1, 1, -1)
            for bias in (state.float_bias, state.bias)
        )
        return ActivationError(rows, float_output + input_error @ weight.mT, unrounded_output, state.activation)
