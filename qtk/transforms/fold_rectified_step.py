"""The step that folds the scale of a batch norm behind a rectifier into the layer in front of it, and adds the shift.

With f(r x) = r f(x) for r ≥ 0 and scale = sign · |scale|: ``f(z) scale + shift = sign (f(|scale| z) + sign shift)``.
The layer takes up |scale|, the layers behind take up the signs if some are −1, and a sum with sign · shift is left.
Nothing is divided, and a convolution behind the sum may pad: padding is 0 behind it, as it was behind the batch norm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, fx

from qtk.errors import CalibrationError
from qtk.graph.captured_graph import CapturedGraph
from qtk.operators.targets import attribute
from qtk.transforms.fold_batch_norm_step import FoldBatchNorm
from qtk.transforms.graph_editor import beside, read_parameter
from qtk.transforms.steps import State
from qtk.transforms.weight_layout import along_inputs, along_outputs


@dataclass(frozen=True, slots=True, eq=False)
class FoldRectifiedBatchNorm(FoldBatchNorm):
    """Folds a batch norm behind a rectifier, and leaves the sum of its shift.

    ``layers``: the layer in front, then the layers behind that take up signs; none of these where no scale is negative.

    Args:
        trailing: the number of axes behind the channels, of the value that it reads.
    """

    trailing: int = 0

    def update(self, state: State) -> None:
        """Folds in float64; each changed parameter is rounded once.

        Raises: CalibrationError if a scale is negative, as of another checkpoint, and no layer takes up its sign.
        """
        scale, shift = self._scale_and_shift(state)
        before, *behind = self.layers
        if not behind and bool((scale < 0).any()):
            raise CalibrationError(f"{self.weight} has negative values in this checkpoint, and had none when the batch "
                                   "norm was folded; make the simulation of this checkpoint")
        signs = torch.where(scale < 0, -torch.ones_like(scale), torch.ones_like(scale))
        weight = state[before.weight]
        factors = along_outputs(scale.abs(), tuple(weight.shape), before.product, before.groups)
        state[before.weight] = (weight.double() * factors).to(weight.dtype)
        if before.bias in state:
            state[before.bias] = (state[before.bias].double() * scale.abs()).to(weight.dtype)
        for layer in behind:
            weight = state[layer.weight]
            factors = along_inputs(signs, tuple(weight.shape), layer.product, layer.groups)
            state[layer.weight] = weight * factors.to(weight.dtype)
        state[self.shift] = (signs * shift).to(weight.dtype).reshape(-1, *[1] * self.trailing)

    def _replacement(self, graph: CapturedGraph, node: fx.Node, x: fx.Node, mean: fx.Node) -> fx.Node:
        new: Tensor = attribute(graph, str(mean.target))
        name = beside(str(mean.target), self.shift.rpartition(".")[2])
        parameter = read_parameter(graph, name, mean, new=torch.zeros_like(new).reshape(-1, *[1] * self.trailing))
        with node.graph.inserting_before(node):
            call = node.graph.call_function(torch.ops.aten.add.Tensor, (x, parameter))
        call.meta = dict(node.meta)
        return call
