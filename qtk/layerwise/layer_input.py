"""The input of a layer that a walk has reached, and the power of the layer's output."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from qtk.layerwise.weighted_layers import WeightedLayer
from qtk.moments.second_moments import SecondMoments

ELEMENTS = 1 << 18
"""Elements of an output that are compared together: they and their errors stay in a cache."""


@dataclass(slots=True)
class OutputPower:
    """Sums of the squares of a layer's float output and of its error; 0 before the walk has passed the layer."""

    signal: float = 0.0
    noise: float = 0.0

    def measured(self) -> tuple[float | None, float | None]:
        """Signal and noise; ``None`` if the walk has measured nothing."""
        return (self.signal, self.noise) if self.signal else (None, None)

    def add(self, float_output: Tensor, simulated: Tensor) -> None:
        pairs = (torch.split(output.flatten(), ELEMENTS) for output in (float_output, simulated))
        for reference, other in zip(*pairs, strict=True):
            reference = reference.to(torch.float32)
            error = reference - other
            self.signal += float(reference @ reference)
            self.noise += float(error @ error)


@dataclass(frozen=True, slots=True, eq=False)
class LayerInput:
    """The input of a layer that all batches have reached.

    Args:
        layer: the layer.
        moments: statistics of its input; ``None`` if none were required, or no data reached it.
        output: power of its output; stays 0 where it is not measured: with one path, and in nested layers.
        held_out_output: the same of the samples that are held out.
        waits: whether this layer, and layers before, are to be updated before the walk goes on; else it runs nothing
            before the next layer, or nothing that reads the new weights.
    """

    layer: WeightedLayer
    moments: SecondMoments | None
    output: OutputPower = field(default_factory=OutputPower)
    held_out_output: OutputPower = field(default_factory=OutputPower)
    waits: bool = True
