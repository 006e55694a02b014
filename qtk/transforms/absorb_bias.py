"""High-bias absorption: what a ReLU always lets pass moves from the bias before it into the biases behind it.

relu(W x + b) = relu(W x + b − c) + c where W x + b ≥ c, so that the layers behind take up W' c and the values between
have a smaller range (Nagel et al., arXiv:1906.04721, §4.1.3).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, fx, nn

from qtk.algorithms.equalization import absorbed_bias
from qtk.channels.channel_scales import ChannelScales, WeightedInput, WeightedOutput
from qtk.graph.graphs import graphs
from qtk.graph.sites import value_site
from qtk.operators.lookup import row_of
from qtk.operators.op_row import Product
from qtk.operators.targets import attribute, schema_arguments
from qtk.transforms.fold_batch_norm_step import FoldBatchNorm, Into, Layer, owner_of
from qtk.transforms.graph_editor import GraphEditor
from qtk.transforms.named_tensors import NamedTensors
from qtk.transforms.proof import Group
from qtk.transforms.steps import ScaleParameter, State, steps_of
from qtk.transforms.touched_sites import sites_of_parameters, sites_of_values
from qtk.transforms.weight_layout import along_inputs, summed_per_output

Statistics: TypeAlias = Mapping[str, tuple[Tensor, Tensor]]
"""Name of a weight → mean and standard deviation [out] of what the layer makes, as its batch norm knew them."""

LEAST = 0.01
"""Part of a standard deviation that is not worth absorbing."""


@dataclass(frozen=True, slots=True, eq=False)
class AbsorbBias:
    """Lowers a bias and lets the layers behind the rectifier add what they miss.

    Args:
        bias: its name.
        amount: [C] float64, by how much.
        layers: the layers behind.
    """

    bias: str
    amount: Tensor
    layers: tuple[Layer, ...]

    def edit(self, editor: GraphEditor) -> None:
        """Leaves the graphs as they are."""

    def update(self, state: State) -> None:
        """Adds in float64; each bias is rounded once."""
        old = state[self.bias]
        amount = self.amount.to(old.device)
        state[self.bias] = (old.double() - amount).to(old.dtype)
        for layer in self.layers:
            weight, bias = state[layer.weight].double(), state[layer.bias]
            shifts = weight * along_inputs(amount, tuple(weight.shape), layer.product, layer.groups)
            state[layer.bias] = (bias.double() + summed_per_output(shifts, layer.product, layer.groups)).to(bias.dtype)


def folded_statistics(model: nn.Module) -> Statistics:
    """Weight → mean and standard deviation [out] of what its layer makes, of layers that a batch norm was folded into.

    They are the statistics of the batch norm's output in training, scaled and shifted as later steps scaled and shifted
    the layer's bias.
    """
    statistics: dict[str, tuple[Tensor, Tensor]] = {}
    weights: dict[str, str] = {}
    for step in steps_of(model):
        if isinstance(step, FoldBatchNorm) and step.into is Into.PRODUCER:
            (layer,) = step.layers
            weights[layer.bias] = layer.weight
            statistics[layer.weight] = step.output_mean.double(), step.output_std.double()
        elif isinstance(step, ScaleParameter) and (weight := weights.get(step.parameter)) is not None:
            mean, std = statistics[weight]
            statistics[weight] = mean * step.factor, std * step.factor
        elif isinstance(step, AbsorbBias) and (weight := weights.get(step.bias)) is not None:
            mean, std = statistics[weight]
            statistics[weight] = mean - step.amount, std
    return statistics


def absorbable_biases(model: nn.Module, scales: ChannelScales, statistics: Statistics) -> Iterator[Group]:
    """One group for every layer of ``statistics`` whose bias the layers behind it can absorb; others have the reason.

    Args:
        model: a prepared model without quantizers.
        scales: of the model.
        statistics: of the model as it is.
    """
    reads = _reads(model)
    readers: dict[fx.Node, list[WeightedInput]] = {}
    for read in scales.inputs:
        readers.setdefault(read.value, []).append(read)
    written = {output.node: output for output in scales.outputs}
    for output in scales.outputs:
        if output.weight not in statistics:
            continue
        found = _layers_behind(output, readers, written, reads)
        if isinstance(found, str):
            yield Group(f"bias of {owner_of(output.weight)}", (), found)
            continue
        layers, rectified = found
        mean, std = (side.detach().double().cpu() for side in statistics[output.weight])
        assert output.smallest is not None
        assert output.bias is not None
        amount = absorbed_bias(mean, std, output.smallest.double().cpu())
        amount = torch.where(amount > LEAST * std, amount, 0.0)
        name = f"bias of {owner_of(output.weight)} → {', '.join(owner_of(layer.weight) for layer in layers)}"
        if not bool(amount.any()):
            yield Group(name, (), "no channel is far above 0")
            continue
        changed = [output.bias, *(layer.bias for layer in layers)]
        sites = sites_of_values([output.node, *rectified]) | sites_of_parameters(model, changed)
        detail = f"{int((amount > 0).sum())} of {len(amount)} channels, at most {float(amount.max()):.3g}"
        yield Group(name, (AbsorbBias(output.bias, amount, tuple(layers)),), detail, tuple(sorted(sites, key=str)))


def _layers_behind(
    output: WeightedOutput, readers: Mapping[fx.Node, list[WeightedInput]], written: Mapping[fx.Node, WeightedOutput],
    reads: Counter[str],
) -> tuple[list[Layer], list[fx.Node]] | str:
    """The layers that alone read what a layer makes, behind a rectifier, and the nodes between; or why none do."""
    if output.bias is None or output.smallest is None:
        return "it has no bias"
    if reads[output.bias] != 1 or reads[output.weight] != 1:
        return "its parameters are read in several places"
    node, between, rectified = output.node, [], False
    while len(node.users) == 1 and not (rectified and node in readers):
        (node,) = node.users
        row = row_of(node)
        if row is None or (not row.rectifier and row.kind not in ("identity", "dropout")):
            return f"{row.kind if row is not None else node.op} follows it"
        rectified = rectified or row.rectifier
        between.append(node)
    behind = readers.get(node, [])
    if not rectified or len(behind) != len(node.users) or not behind:
        return "more than layers behind one rectifier read it"
    layers = []
    for read in behind:
        row, maker = row_of(read.node), written.get(read.node)
        assert row is not None
        if maker is None or maker.bias is None or read.weight is None or reads[maker.bias] != 1:
            return f"{value_site(read.node).owner or read.node.name} has no bias of its own"
        if row.product is None or row.product is Product.CONV_TRANSPOSE or _is_padded(read.node):
            return f"{owner_of(read.weight)} sees padding too, which is 0 in any case"
        groups = schema_arguments(read.node).get("groups", 1)
        assert isinstance(groups, int)
        layers.append(Layer(read.weight, maker.bias, row.product, len(maker.variables), groups))
    if any(read.weight_index is None or len(read.variables) != len(output.variables) for read in behind):
        return "the layers behind read the channels in another order"
    return layers, between


def _is_padded(node: fx.Node) -> bool:
    padding = schema_arguments(node).get("padding", 0)
    numbers = padding if isinstance(padding, (list, tuple)) else [padding]
    return any(number not in (0, "valid") for number in numbers)


def _reads(model: nn.Module) -> Counter[str]:
    """Says how often ops read each parameter."""
    members, counts = NamedTensors(model), Counter[str]()
    for graph in graphs(model).values():
        for node in graph.graph.find_nodes(op="get_attr"):
            tensor = attribute(graph, str(node.target))
            name = members.name(tensor) if isinstance(tensor, Tensor) else None
            if name is not None:
                counts[name] += len(node.users)
    return counts
