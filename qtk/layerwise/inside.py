"""What reaches the layers inside a module that runs as it pleases: a loop over time, a model's own Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from qtk.layerwise.second_moments import SecondMoments, Wanted
from qtk.layerwise.taps import tapped
from qtk.layerwise.weighted_layers import WeightedLayer
from qtk.quantizers.modes import in_mode
from qtk.quantizers.quantizer import Mode, Quantizer


class Inside:
    """Gathers the moments of all layers inside a module over all their calls.

    They are decided together, so what reaches one on the quantized path is still to change; in experiments it was
    better not to correct for it (docs/decisions.md). So a layer is judged by the inputs of one path alone.

    The weight of an op is known by the very tensor: the parameter, or what its quantizer made of it.

    Args:
        module: what is run.
        wanted: the layers; those with ``None`` are passed by.
        quantized: whether quantizers act.
    """

    def __init__(
        self, module: nn.Module, wanted: Mapping[WeightedLayer, Wanted | None], *, quantized: bool
    ) -> None:
        self.moments: dict[WeightedLayer, SecondMoments] = {}
        self._module = module
        self._wanted = {layer: needed for layer, needed in wanted.items() if needed is not None}
        self._quantized = quantized
        self._layer_of: dict[int, WeightedLayer] = {}
        self._seen: dict[WeightedLayer, list[Tensor]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While this runs, ``observe`` sees."""
        with ExitStack() as stack:
            for layer in self._wanted:
                handle = layer.quantizer.register_forward_hook(self._name_output(layer))
                stack.callback(handle.remove)
                self._layer_of[id(layer.weight)] = layer
            stack.enter_context(tapped(self._module, self._see))
            yield

    @torch.no_grad()
    def observe(self, call: Callable[[], object]) -> None:
        """Runs one batch."""
        self._seen = {}
        with in_mode(() if self._quantized else quantizers_in(self._module), Mode.BYPASS):
            call()
        for layer, inputs in self._seen.items():
            moments = self.moments.setdefault(layer, SecondMoments(layer.geometry, self._wanted[layer]))
            for x in _together(layer, inputs):
                moments.observe(x)

    def _see(self, x: Tensor, weight: Tensor) -> None:
        layer = self._layer_of.get(id(weight))
        if layer is not None:
            self._seen.setdefault(layer, []).append(x)

    def _name_output(self, layer: WeightedLayer) -> Any:
        made: list[Tensor] = []  # held, so that no other tensor can take the name

        def hook(module: nn.Module, args: object, output: Tensor) -> None:
            if not any(output is other for other in made):
                made.append(output)
                self._layer_of[id(output)] = layer

        return hook


def quantizers_in(module: nn.Module) -> list[Quantizer]:
    return [inner for inner in module.modules() if isinstance(inner, Quantizer)]


def _together(layer: WeightedLayer, calls: list[Tensor]) -> list[Tensor]:
    """The inputs of a linear layer's calls as one: a loop over time makes many small ones."""
    if layer.geometry.kernel:
        return calls
    return [torch.cat([x.reshape(-1, x.shape[-1]) for x in calls])]
