"""Bias correction on a layer: gives every output the mean it has in the float model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from qtk.algorithms.bias_correction import bias_correction
from qtk.core.spec import QuantSpec
from qtk.layerwise.layer_state import LayerState
from qtk.moments.required_statistics import RequiredStatistics
from qtk.public import public


@public
@dataclass(frozen=True, slots=True)
class BiasCorrection:
    """Adds the mean error of each output to the bias (arXiv 1906.04721, section 4.2), if the layer has one."""

    needs_bias: ClassVar[bool] = True
    searches_scale: ClassVar[bool] = False

    def min_rows(self, columns: int) -> int:
        return 0

    def refuses(self, spec: QuantSpec) -> str | None:
        return None

    def required_statistics(self, block: int | None) -> RequiredStatistics:
        return RequiredStatistics(block, gram=False)

    def apply(self, state: LayerState) -> LayerState:
        if state.bias is None:
            return state
        exact = replace(state, dtype=torch.float64)
        weight = exact.to_gemm(state.float_weight)
        shift = bias_correction(
            weight, exact.to_gemm(state.simulated_weight()), state.moments.mean, state.moments.mean_difference,
        ).reshape(weight.shape[:2])
        assert state.float_bias is not None
        present = (state.bias - state.float_bias).to(shift).reshape(shift.shape)
        rows = state.moments.rows_of_means
        earlier = float((rows * present * (present - 2 * shift)).sum())
        before, now = (state.current_error() + earlier,) * 2 if state.loss is None else state.loss
        gain = float((rows * shift.square()).sum()) + earlier  # rows · (mean error)², which the shift removes
        bias = (state.float_bias + shift.to(state.bias.device).reshape(state.bias.shape)).to(state.bias.dtype)
        return replace(state, bias=bias, loss=(before, now - gain))
