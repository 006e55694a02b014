"""AdaRound: every weight is rounded up or down, as is best for the output of its layer."""

from __future__ import annotations

from dataclasses import dataclass

from qtk.algorithms.adaround import Adaround
from qtk.algorithms.output_error import ActivationError
from qtk.core.dtypes import FloatDtype
from qtk.core.spec import QuantSpec
from qtk.layerwise.layer_state import LayerState
from qtk.layerwise.second_moments import Wanted

SAMPLED = 2048
"""Rows that what follows a layer is judged by."""


@dataclass(frozen=True, slots=True)
class AdaptiveRounding(Adaround):
    """Rounds the weights on the grid of the present encoding.

    Args:
        through_activation: where a ReLU, GELU or the like alone reads the output, keep what it makes of it, judged by a
            sample of rows: below 0, say, an error is none.
    """

    through_activation: bool = False

    def wants(self, block: int | None) -> Wanted:
        return Wanted(sample=SAMPLED if self.through_activation else 0)

    def refuses(self, spec: QuantSpec) -> str:
        small = isinstance(spec.dtype, FloatDtype)
        return f"AdaRound needs codes that are integers, not {spec.dtype}" if small else ""

    def apply(self, problem: LayerState) -> LayerState:
        weight, grid = problem.matrix(problem.original)[:, None], problem.grid()[:, None]
        return problem.better(weight=self.rounded(weight, grid, problem.error, self._behind(problem))[:, 0])

    def _behind(self, problem: LayerState) -> ActivationError | None:
        if not self.through_activation or problem.activation is None:
            return None
        rows, apart = (part.to(problem.dtype)[:, None] for part in problem.moments.sample)
        weight = problem.matrix(problem.original)[:, None]
        near = rows @ weight.mT
        if problem.bias is not None:
            near = near + problem.bias.to(problem.dtype).reshape(len(near), 1, 1, -1)
        return ActivationError(rows, near + apart @ weight.mT, near, problem.activation)
