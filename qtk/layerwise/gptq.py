"""GPTQ on a layer: rounds its columns in order and propagates each error through the inverse Hessian."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from qtk.algorithms.gptq import gptq
from qtk.core.spec import QuantSpec
from qtk.errors import CalibrationError
from qtk.layerwise.layer_state import LayerState
from qtk.moments.required_statistics import RequiredStatistics
from qtk.public import public


@public
@dataclass(frozen=True, slots=True)
class Gptq:
    """GPTQ (arXiv 2210.17323) with the present encoding.

    Where the quantized model's input X̂ differs from the float model's X, it rounds the least-squares weights
    ``w + H⁻¹ Eᵀ w`` (damped H), whose output on X̂ is closest to the float output, not w (arXiv 2504.02692).

    Args:
        damping: added to the diagonal of the Hessian, as a multiple of its mean.
        act_order: round the columns with the largest inputs first.
        columns_at_once: columns whose errors are propagated to the rest together; does not change the result.

    Raises: CalibrationError if ``damping`` is not above 0 or ``columns_at_once`` below 1.
    """

    needs_bias: ClassVar[bool] = False
    searches_scale: ClassVar[bool] = False

    damping: float = 0.01
    act_order: bool = True
    columns_at_once: int = 128

    def __post_init__(self) -> None:
        if not 0 < self.damping < math.inf or self.columns_at_once < 1:
            raise CalibrationError(f"GPTQ needs a finite damping > 0 and columns_at_once ≥ 1, got {self.damping} and "
                                   f"{self.columns_at_once}")

    def min_rows(self, columns: int) -> int:
        return 2 * columns

    def refuses(self, spec: QuantSpec) -> str | None:
        return None

    def required_statistics(self, block: int | None) -> RequiredStatistics:
        return RequiredStatistics()

    def apply(self, state: LayerState) -> LayerState:
        """Raises: CalibrationError if the damped Hessian has no inverse."""
        error = state.error
        rounded = gptq(
            state.to_gemm(state.float_weight), error.gram[:, 0], state.grid(),
            None if error.linear is None else error.linear[:, 0], damping=self.damping, act_order=self.act_order,
            columns_at_once=self.columns_at_once,
        )
        return state.updated(weight=rounded)
