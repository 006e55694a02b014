"""The step that folds one batch norm into the layer before it, the layers behind it, or a scale and a shift."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from qtk.capture.holders import forget_type
from qtk.core.site import Site
from qtk.graph.captured_graph import CapturedGraph
from qtk.graph.sites import join
from qtk.nn.batch_norm import BatchNorm
from qtk.nn.scale_shift import ScaleShift
from qtk.operators.lookup import row_of
from qtk.operators.op_row import Product
from qtk.operators.targets import attribute
from qtk.transforms.graph_editor import GraphEditor, add_module, beside, erase, read_parameter, weight_parameter
from qtk.transforms.steps import State
from qtk.transforms.weight_layout import along_inputs, along_outputs, summed_per_output


class Into(enum.Enum):
    """What a batch norm is folded into."""

    PRODUCER = "the layer before it"
    CONSUMERS = "the layers behind it"
    RECTIFIED = "the layer in front of the rectifier before it, and a sum"
    SCALE_SHIFT = "a scale and a shift"


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer that takes up a batch norm.

    Args:
        weight: name of its weight.
        bias: name of its bias, before and after.
        product: how it multiplies its weight.
        outputs: number of its output channels.
        groups: of a convolution.
    """

    weight: str
    bias: str
    product: Product
    outputs: int
    groups: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class FoldBatchNorm:
    """Folds a batch norm, y = x · scale + shift with scale = γ / √(var + eps) and shift = β − mean · scale.

    Args:
        calls: sites of the values of its calls.
        into: what it is folded into.
        layers: the layers that take it up; none for a scale and a shift.
        weight: name of γ, ``None`` for 1.
        bias: name of β, ``None`` for 0.
        mean: name of the running mean.
        var: name of the running variance.
        eps: added to the variance.
        scale: name of the scale, of a scale and a shift.
        shift: name of the shift.
        output_mean: [C] β, the mean of each channel of its output in training.
        output_std: [C] |γ|, the standard deviation of each channel of its output in training.
    """

    calls: tuple[Site, ...]
    into: Into
    layers: tuple[Layer, ...]
    weight: str | None
    bias: str | None
    mean: str
    var: str
    eps: float
    scale: str
    shift: str
    output_mean: Tensor
    output_std: Tensor

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the batch norm's parameters and statistics."""
        counter = join(self.mean.rpartition(".")[0], "num_batches_tracked")
        return tuple(name for name in (self.weight, self.bias, self.mean, self.var, counter) if name is not None)

    def update(self, state: State) -> None:
        """Folds in float64; each changed parameter is rounded once."""
        scale, shift = self._scale_and_shift(state)
        if self.into is Into.SCALE_SHIFT:
            dtype = state[self.mean].dtype
            state[self.scale], state[self.shift] = scale.to(dtype), shift.to(dtype)
        for layer in self.layers:
            weight, product, groups = state[layer.weight], layer.product, layer.groups
            shape = tuple(weight.shape)
            bias = state[layer.bias].double() if layer.bias in state else scale.new_zeros(())
            if self.into is Into.PRODUCER:
                folded = weight.double() * along_outputs(scale, shape, product, groups)
                bias = bias * scale + shift
            else:
                folded = weight.double() * along_inputs(scale, shape, product, groups)
                shifts = weight.double() * along_inputs(shift, shape, product, groups)
                bias = bias + summed_per_output(shifts, product, groups)
            state[layer.weight], state[layer.bias] = folded.to(weight.dtype), bias.to(weight.dtype)

    def _scale_and_shift(self, state: State) -> tuple[Tensor, Tensor]:
        mean, var = state[self.mean].double(), state[self.var].double()
        scale = torch.rsqrt(var + self.eps)
        if self.weight is not None:
            scale = scale * state[self.weight].double()
        shift = -mean * scale
        return scale, shift if self.bias is None else shift + state[self.bias].double()

    def edit(self, editor: GraphEditor) -> None:
        """Takes the calls of the batch norm out of the graphs; the layers read a bias afterwards."""
        for site in self.calls:
            for graph, node in editor.makers(site):
                self._edit_call(graph, node)
        for layer in self.layers if self.into is not Into.RECTIFIED else ():
            new: nn.Parameter | None = None  # one that is new is 0, and the same in all graphs
            for graph, node in editor.layers(layer.weight):
                new = give_bias(graph, node, layer, new)

    def _edit_call(self, graph: CapturedGraph, node: fx.Node) -> None:
        x, mean, module = node.args[0], node.args[3], node.args[-1]
        assert isinstance(x, fx.Node)
        assert isinstance(mean, fx.Node)
        assert isinstance(module, fx.Node)
        node.replace_all_uses_with(self._replacement(graph, node, x, mean))
        erase(node)
        if not any(read.target == module.target for read in graph.graph.find_nodes(op="get_attr")):
            self._forget(graph, str(module.target))

    def _forget(self, graph: CapturedGraph, target: str) -> None:
        """Leaves of the batch norm at ``target`` what its members are read from."""
        if isinstance(graph.get_submodule(target), BatchNorm):
            graph.delete_submodule(target)
        else:
            forget_type(graph, target)

    def _replacement(self, graph: CapturedGraph, node: fx.Node, x: fx.Node, mean: fx.Node) -> fx.Node:
        """Returns what stands for the batch norm ``node`` of ``x`` afterwards."""
        return x if self.into is not Into.SCALE_SHIFT else self._scale_shift(graph, node, x, mean)

    def _scale_shift(self, graph: CapturedGraph, node: fx.Node, x: fx.Node, mean: fx.Node) -> fx.Node:
        """A new call of ``ScaleShift`` on ``x``, with parameters beside the statistics."""
        new = torch.zeros_like(attribute(graph, str(mean.target)))
        names = [beside(str(mean.target), name.rpartition(".")[2]) for name in (self.scale, self.shift)]
        parameters = [read_parameter(graph, name, mean, new=new) for name in names]
        target = add_module(graph, beside(str(mean.target), "scale_shift"), ScaleShift())
        with node.graph.inserting_before(node):
            call = node.graph.call_module(target, (x, *parameters))
        call.meta = dict(node.meta)
        return call


def owner_of(name: str) -> str:
    """The path of the module that holds a parameter; the parameter itself if that is the model."""
    return name.rpartition(".")[0] or name


def give_bias(graph: CapturedGraph, node: fx.Node, layer: Layer, new: nn.Parameter | None) -> nn.Parameter | None:
    """Lets a layer read its bias, which is added as ``new``, or as zeros, if it has none. Returns: what was added."""
    row, weight = row_of(node), weight_parameter(node)
    assert row is not None
    assert row.bias is not None
    assert weight is not None
    args = [*node.args, *[None] * (row.bias + 1 - len(node.args))]
    if args[row.bias] is not None:
        return new
    if new is None:
        old = attribute(graph, str(weight.target))
        new = nn.Parameter(old.new_zeros(layer.outputs), old.requires_grad)
    args[row.bias] = read_parameter(graph, beside(str(weight.target), layer.bias.rpartition(".")[2]), weight, new=new)
    node.args = tuple(args)
    return new
