"""What layers held before a layer-wise run, which is put back if the run fails."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from qtk.core.encoding import Encoding
from qtk.layerwise.interrupts import uninterrupted
from qtk.layerwise.weighted_layers import WeightedLayer


class Originals:
    """Encodings and flags of layers, and copies of the parameters that were about to be written, on the CPU.

    Args:
        layers: the layers, as they are now.
    """

    def __init__(self, layers: Sequence[WeightedLayer]) -> None:
        self._quantizers: dict[WeightedLayer, tuple[Encoding | None, bool, bool]] = {
            layer: (layer.quantizer.encoding, layer.quantizer.frozen, layer.quantizer.rewrote_weight)
            for layer in layers
        }
        self._parameters: list[tuple[Tensor, Tensor]] = []

    def keep(self, *parameters: Tensor | None) -> None:
        """Copies parameters before they are written."""
        self._parameters += [
            (parameter, parameter.detach().to("cpu", copy=True)) for parameter in parameters if parameter is not None
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Puts everything back, the last parameter first."""
        for parameter, copy in reversed(self._parameters):
            parameter.copy_(copy)
        for layer, (encoding, frozen, rewrote_weight) in self._quantizers.items():
            quantizer = layer.quantizer
            quantizer.frozen = False
            if encoding is None:
                quantizer.drop_encoding()
            else:
                quantizer.load_encoding(encoding)
            quantizer.frozen, quantizer.rewrote_weight = frozen, rewrote_weight


@contextmanager
def unchanged_on_error(layers: Sequence[WeightedLayer]) -> Iterator[Originals]:
    """Puts back what the layers held if the body raises, Ctrl-C included."""
    originals = Originals(layers)
    try:
        yield originals
    except BaseException:
        with uninterrupted():
            originals.restore()
        raise
