"""AdaRound: every weight is rounded up or down, as is best for the output of its layer."""

from __future__ import annotations

from dataclasses import dataclass

from qtk.algorithms.adaround import Adaround
from qtk.observers.second_moments import Wanted
from qtk.transforms.layer_problem import LayerProblem


@dataclass(frozen=True, slots=True)
class AdaptiveRounding(Adaround):
    """Rounds the weights on the grid of the present encoding."""

    def wants(self, block: int | None) -> Wanted:
        return Wanted()

    def apply(self, problem: LayerProblem) -> LayerProblem:
        weight, grid = problem.matrix(problem.original)[:, None], problem.grid()[:, None]
        return problem.better(weight=self.rounded(weight, grid, problem.error)[:, 0])
