"""What layer-wise methods have made of one layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qtk.core.encoding import Encoding
from qtk.errors import CalibrationError
from qtk.layerwise.layer_state import LayerState, Step
from qtk.layerwise.second_moments import SecondMoments
from qtk.layerwise.weighted_layers import WeightedLayer

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class LayerUpdate:
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
        """Puts the numbers into the layer, and freezes the encoding if it or the weight is new."""
        quantizer, present = layer.quantizer, layer.quantizer.encoding
        new = present is None or not present.equals(self.encoding.to(present.scale.device))
        if new:
            quantizer.frozen = False
            quantizer.load_encoding(self.encoding)
        quantizer.frozen = quantizer.frozen or new or self.weight is not None
        if self.weight is not None:
            layer.weight.copy_(self.weight)
            quantizer.rewrote_weight = True
        if self.bias is not None and layer.bias is not None:
            layer.bias.copy_(self.bias)


def improved(layer: WeightedLayer, steps: Sequence[Step], moments: SecondMoments) -> LayerUpdate:
    """The layer after all steps, on the CPU; it is not changed itself.

    Raises: CalibrationError if a step cannot.
    """
    try:
        with torch.no_grad():
            start = problem = LayerState.of(layer, moments)
            for step in steps:
                problem = step.apply(problem)
    except CalibrationError as error:
        raise CalibrationError(f"{layer.name}: {error}") from None
    before, after = problem.loss or (0.0, 0.0)
    return LayerUpdate(
        problem.encoding.to(CPU), None if problem.weight is start.weight else problem.weight.to(CPU),
        None if problem.bias is start.bias or problem.bias is None else problem.bias.to(CPU), before, after,
    )
