"""GPTQ: weights are rounded column by column, the later ones making up for the earlier."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qtk.algorithms.gptq import Gptq
from qtk.core.spec import QuantSpec
from qtk.layerwise.layer_state import LayerState
from qtk.layerwise.second_moments import Wanted


@dataclass(frozen=True, slots=True)
class GptqRounding(Gptq):
    """Rounds the weights on the grid of the present encoding.

    Where the quantized model's input differs from the float one's, the weights that are rounded are those which with it
    come closest to the float output: ``w + H⁻¹ Eᵀ w``, with the damped H (the least squares of arXiv 2504.02692).
    """

    def wants(self, block: int | None) -> Wanted:
        return Wanted()

    def refuses(self, spec: QuantSpec) -> str:
        return ""

    def apply(self, problem: LayerState) -> LayerState:
        error, grid = problem.error, problem.grid()
        gram = error.gram[:, 0].to(torch.float64)
        rounded = []
        for group, own in enumerate(gram):
            weight = problem.matrix(problem.original)[group].to(torch.float64)
            if error.linear is not None:
                weight = weight + self.solved(own, error.linear[group, 0].to(torch.float64))
            rounded.append(self.rounded(weight, own, grid[group]))
        return problem.better(weight=torch.stack(rounded))
