"""Puts the float weights of layers that layer-wise methods have rewritten in place while the float model runs."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from qtk.graph.simulation import Simulation
from qtk.layerwise.originals import valid_original
from qtk.layerwise.weighted_layers import weighted_layers
from qtk.quantizers.original import KeptTensor
from qtk.quantizers.quantizer import Quantizer


class FloatWeights:
    """What layers held before layer-wise methods rewrote them, as far as it is kept.

    Args:
        simulation: the simulation; warns of layers whose float values are not kept, as after ``load``.
    """

    def __init__(self, simulation: Simulation) -> None:
        layers, _ = weighted_layers(simulation.model, simulation.plan)
        self._kept: list[tuple[Quantizer, Tensor, KeptTensor]] = []
        self.rounded: dict[Quantizer, Tensor] = {}
        gone = []
        for layer in layers:
            original = valid_original(layer)
            if original is None:
                gone += [layer.name] if layer.quantizer.rewrote_weight else []
                continue
            pairs = ((layer.weight, original.weight), (layer.bias, original.bias))
            self._kept += [(layer.quantizer, own, kept) for own, kept in pairs if own is not None and kept is not None]
            if original.weight is not None:
                self.rounded[layer.quantizer] = layer.weight.detach().clone()
        self.missing: str | None = None
        """What is said of layers whose float values are not kept; ``None`` if there are none."""
        if gone:
            self.missing = (
                f"the float weights of {len(gone)} layers ({', '.join(gone[:3])}{', …' if gone[3:] else ''}) are not "
                "kept (a simulation from a file, keep_originals=False, or changed since): their rounded weights are "
                "taken for the float model, and their own error is not seen"
            )
            warnings.warn(self.missing, stacklevel=4)

    @contextmanager
    def in_place(
        self, *, of: Collection[Quantizer] | None = None, but: Collection[Quantizer] = ()
    ) -> Iterator[None]:
        """The model has them inside, and its own again afterwards.

        Args:
            of: the weight quantizers of the layers that get them; ``None``: of all.
            but: the weight quantizers of layers that stay unchanged.
        """
        placed = [(own, kept) for quantizer, own, kept in self._kept
                  if (of is None or quantizer in of) and quantizer not in but]
        present = [(own, own.detach().clone()) for own, _ in placed]
        try:
            with torch.no_grad():
                for own, kept in placed:
                    own.copy_(kept.load())
            yield
        finally:
            with torch.no_grad():
                for own, value in present:
                    own.copy_(value)
