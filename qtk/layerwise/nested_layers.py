"""Collects statistics of the layers inside a module that runs as a whole: a loop over time, a model's own Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, fx, nn

from qtk.layerwise.input_taps import input_taps
from qtk.layerwise.path_evaluator import quantizers_in
from qtk.layerwise.weighted_layers import WeightedLayer
from qtk.moments.matrix_rows import MatrixRows
from qtk.moments.required_statistics import RequiredStatistics
from qtk.moments.second_moments import SecondMoments
from qtk.quantizers.modes import in_mode
from qtk.quantizers.quantizer import Mode


class NestedLayers:
    """Collects the statistics of all layers inside a module, over all calls of each.

    The layers are updated together afterwards, which changes their inputs on the quantized path. In experiments it was
    better not to correct for that change (D-layerwise-3): statistics are of one path only.

    The weight of a call is recognized by identity: it is the parameter, or the output of its quantizer.

    Args:
        module: the module to run.
        required: layer → statistics to collect; layers with ``None`` are skipped.
        quantized: whether quantizers act while it runs.
    """

    def __init__(
        self, module: nn.Module, required: Mapping[WeightedLayer, RequiredStatistics | None], *, quantized: bool
    ) -> None:
        self.moments: dict[WeightedLayer, SecondMoments] = {}
        self._module = module
        self._required = {layer: statistics for layer, statistics in required.items() if statistics is not None}
        self._quantized = quantized
        self._layer_of: dict[int, WeightedLayer] = {}
        self._inputs: dict[WeightedLayer, list[Tensor | MatrixRows]] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Taps the inputs of the layers, so that ``observe`` sees them, while the body runs."""
        with ExitStack() as stack:
            for layer in self._required:
                handle = layer.quantizer.register_forward_hook(self._recognize_outputs(layer))
                stack.callback(handle.remove)
                self._layer_of[id(layer.weight)] = layer
            uses = {op: use for layer in self._required for op, use in layer.uses.items()}
            stack.enter_context(input_taps(self._module, self._collect, uses))
            yield

    @torch.no_grad()
    def observe(self, call: Callable[[], object], batch: int = 0, samples: int | None = None) -> None:
        """Runs one batch, of so many samples, and adds the inputs of the layers to their statistics."""
        self._inputs = {}
        with in_mode(() if self._quantized else quantizers_in(self._module), Mode.BYPASS):
            call()
        for layer, observed in self._inputs.items():
            moments = self.moments.setdefault(layer, SecondMoments(layer.geometry, self._required[layer]))
            rows = [x for x in observed if isinstance(x, MatrixRows)]
            inputs = [x for x in observed if isinstance(x, Tensor)]
            if rows:
                moments.observe_matrices(MatrixRows.joined(rows), batch=batch)
            if not inputs:
                continue
            holdout = moments.required.holdout
            if holdout is None:
                for x in _joined(layer, inputs):
                    moments.observe(x)
                continue
            kernel = len(layer.geometry.kernel)
            parts = [
                holdout.split(x if x.ndim > kernel + 1 else x[None], batch, samples, axes=1 if kernel else x.ndim - 1)
                for x in inputs
            ]
            for kept, held_out in zip(*(_joined(layer, list(each)) for each in zip(*parts, strict=True)), strict=True):
                moments.observe(kept, held_out=(held_out, None))

    def _collect(self, x: Tensor | MatrixRows, weight: Tensor, op: fx.Node | None) -> None:
        layer = self._layer_of.get(id(weight))
        if layer is not None:
            self._inputs.setdefault(layer, []).append(x)

    def _recognize_outputs(self, layer: WeightedLayer) -> Callable[[nn.Module, object, Tensor], None]:
        outputs: list[Tensor] = []  # held, so that no other tensor can take the id

        def hook(module: nn.Module, args: object, output: Tensor) -> None:
            if not any(output is other for other in outputs):
                outputs.append(output)
                self._layer_of[id(output)] = layer

        return hook


def _joined(layer: WeightedLayer, calls: list[Tensor]) -> list[Tensor]:
    """The inputs of a linear layer's calls, concatenated: a loop over time makes many small ones."""
    if layer.geometry.kernel:
        return calls
    return [torch.cat([x.reshape(-1, x.shape[-1]) for x in calls])]
