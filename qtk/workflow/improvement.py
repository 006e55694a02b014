"""What layer-wise methods have made of one layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qtk.core.encoding import Encoding
from qtk.graph.weighted_layers import WeightedLayer
from qtk.observers.second_moments import SecondMoments
from qtk.transforms.layer_problem import LayerProblem, Step


@dataclass(frozen=True, slots=True, eq=False)
class Improvement:
    """A layer's new numbers, and what they gain.

    Args:
        encoding: of the weight.
        weight: ``None`` if it stays.
        bias: likewise.
        before: squared error of the output, summed over outputs and samples, less what no weight can change.
        after: the same with the new numbers.
    """

    encoding: Encoding
    weight: Tensor | None
    bias: Tensor | None
    before: float
    after: float

    @torch.no_grad()
    def write(self, layer: WeightedLayer) -> None:
        """Puts the numbers into the layer and freezes the encoding."""
        layer.quantizer.frozen = False
        layer.quantizer.load_encoding(self.encoding)
        layer.quantizer.frozen = True
        if self.weight is not None:
            layer.weight.copy_(self.weight)
        if self.bias is not None and layer.bias is not None:
            layer.bias.copy_(self.bias)


def improved(layer: WeightedLayer, steps: Sequence[Step], moments: SecondMoments) -> Improvement:
    """The layer after all steps; it is not changed itself.

    Raises: CalibrationError if a step cannot.
    """
    with torch.no_grad():
        start = problem = LayerProblem.of(layer, moments)
        for step in steps:
            problem = step.apply(problem)
    before, after = problem.loss or (0.0, 0.0)
    return Improvement(
        problem.encoding, None if problem.weight is start.weight else problem.weight,
        None if problem.bias is start.bias else problem.bias, before, after,
    )
