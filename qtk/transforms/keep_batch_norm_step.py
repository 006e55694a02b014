"""The steps that keep a batch norm live behind a layer that is quantized as folded, and fold it in the end."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, fx, nn

from qtk.core.site import Site
from qtk.graph.captured_graph import CapturedGraph
from qtk.graph.insert import quantizer_called
from qtk.graph.sites import set_value_site, value_site
from qtk.nn.batch_norm import batch_norm
from qtk.nn.kept_batch_norm import (
    bias_in_use,
    folded_bias,
    folded_weight,
    folding_scale,
    kept_batch_norm,
    own_bias,
    scaled_weight,
    shifted_bias,
    unscaled_weight,
    weight_in_use,
)
from qtk.operators.lookup import row_of
from qtk.operators.op_row import Product
from qtk.operators.targets import MODULE_STACK, batch_norm_called, kept_batch_norm_called
from qtk.quantizers.quantizer import Quantizer
from qtk.transforms.fold_batch_norm_step import FoldBatchNorm, Layer, give_bias
from qtk.transforms.graph_editor import GraphEditor, weight_parameter
from qtk.transforms.steps import State
from qtk.transforms.weight_layout import output_axis

REORDERING = ("reshape", "squeeze", "transpose")
"""Kinds of movement that keep every value once, so that a batch norm in front of it sees the same batch."""


@dataclass(frozen=True, slots=True, eq=False)
class KeepBatchNorm:
    """Lets a layer compute its folded weight and bias in the graph, for quantizers, with the batch norm behind it live.

    The sites of the folded layer (``conv.weight``, ``conv.bias``, ``conv:out``) name the computed weight, the
    computed bias and the output of the batch norm. See ``qtk.nn.kept_batch_norm``.

    Args:
        layer: the layer, which the batch norm follows, or which it does behind ``movement_behind``.
        norm_weight: name of γ, ``None`` for 1.
        norm_bias: name of β, ``None`` for 0.
        mean: name of the running mean.
        var: name of the running variance.
        calls: sites of the values of the batch norm's calls.
        ops: sites of the values of the layer's calls.
    """

    layer: Layer
    norm_weight: str | None
    norm_bias: str | None
    mean: str
    var: str
    calls: tuple[Site, ...]
    ops: tuple[Site, ...]

    def edit(self, editor: GraphEditor) -> None:
        """Puts the computation of weight and bias in front of the layer, once in each graph."""
        made: dict[CapturedGraph, tuple[fx.Node, fx.Node]] = {}
        for graph, node in list(editor.layers(self.layer.weight)):
            if graph not in made:
                made[graph] = self._computed(graph, node)
            _keep(node, *made[graph], _output_axis(node))

    def update(self, state: State) -> None:
        """Leaves the parameters as they are."""

    def _computed(self, graph: CapturedGraph, node: fx.Node) -> tuple[fx.Node, fx.Node]:
        """The weight and the bias in use of the layer that ``node`` calls."""
        layer, code = self.layer, graph.graph
        weight, bias, movement = weight_parameter(node), _bias_of(node), movement_behind(node)
        assert weight is not None
        assert movement is not None
        (norm,) = (node, *movement)[-1].users
        _, norm_weight, norm_bias, mean, var, _, module = norm.args
        nodes = list(code.nodes)
        behind = set(nodes[nodes.index(node) :])
        for read in (norm_weight, norm_bias, mean, var, module):
            if isinstance(read, fx.Node) and read in behind:
                node.prepend(read)
        site = value_site(weight)
        bias_site = Site(site.owner, layer.bias.rpartition(".")[2], "") if bias is None else value_site(bias)
        shape = (output_axis(layer.product), layer.groups)
        with code.inserting_before(node):
            folded = code.call_function(folded_weight, (weight, norm_weight, var, module, *shape))
            used = code.call_function(weight_in_use, (folded, weight, norm_weight, var, module, *shape))
            new_bias = code.call_function(folded_bias, (bias, norm_weight, norm_bias, mean, var, weight, module))
            used_bias = code.call_function(bias_in_use, (new_bias, bias, module))
        assert isinstance(mean, fx.Node)
        values = {"weight": weight.meta["val"], "bias": mean.meta["val"].to(weight.meta["val"].dtype)}
        for made, of, name in (
            (folded, site, "weight"), (used, _named(site, "in_use"), "weight"),
            (new_bias, bias_site, "bias"), (used_bias, _named(bias_site, "in_use"), "bias"),
        ):
            made.meta = {**node.meta, "val": values[name], MODULE_STACK: _around(node, norm)}
            set_value_site(made, of)
        set_value_site(weight, _named(site, "unfolded"))
        if bias is not None:
            set_value_site(bias, _named(bias_site, "unfolded"))
        return used, used_bias


@dataclass(frozen=True, slots=True, eq=False)
class FoldKeptBatchNorm(FoldBatchNorm):
    """Folds a batch norm that ``KeepBatchNorm`` kept: the layer gets weight and bias that it computed in eval mode.

    Args:
        ops: sites of the values of the layer's calls.
    """

    ops: tuple[Site, ...]

    def update(self, state: State) -> None:
        """Folds by the formulas that the graph had, to the last bit."""
        (layer,) = self.layers
        weight, norm_weight = state[layer.weight], None if self.weight is None else state[self.weight]
        scale = folding_scale(norm_weight, state[self.var], self.eps)
        norm_bias = None if self.bias is None else state[self.bias]
        state[layer.bias] = shifted_bias(state.get(layer.bias), scale, norm_bias, state[self.mean], weight.dtype)
        state[layer.weight] = scaled_weight(weight, scale, output_axis(layer.product), layer.groups)

    def edit(self, editor: GraphEditor) -> None:
        """Takes the batch norm, and the computation of weight and bias, out of the graphs."""
        (layer,) = self.layers
        new: nn.Parameter | None = None
        for site in self.ops:
            for graph, made in list(editor.makers(site)):
                # the layer itself, where one editor makes the step that keeps the batch norm and this one
                norm = made if kept_batch_norm_called(made) is not None else next(iter(made.users))
                node = _unkeep(norm)
                self._edit_call(graph, norm)
                new = give_bias(graph, node, layer, new)


def weight_quantizer(norm: fx.Node) -> Quantizer | None:
    """The quantizer of the folded weight in front of a kept batch norm; ``None`` if it has none, or is not kept."""
    if kept_batch_norm_called(norm) is None:
        return None
    node = norm.args[0]
    assert isinstance(node, fx.Node)
    folded = _parameters(node)[0].args[0]
    assert isinstance(folded, fx.Node)
    return quantizer_called(folded)


def unfolded_targets(norm: fx.Node) -> dict[fx.Node, Callable[..., Tensor | None]]:
    """Returns what nodes before a kept batch norm call, for a layer that never computes its folded form."""
    if kept_batch_norm_called(norm) is None:
        return {}
    node = norm.args[0]
    assert isinstance(node, fx.Node)
    weight, bias = _parameters(node)
    return {weight: unscaled_weight, bias: own_bias}


def movement_behind(node: fx.Node) -> list[fx.Node] | None:
    """The ops between a layer's call and the batch norm behind it; ``None`` if one does not only reorder values."""
    movement: list[fx.Node] = []
    while len(node.users) == 1:
        (node,) = node.users
        if batch_norm_called(node) is not None:
            return movement
        row = row_of(node)
        if row is None or row.kind not in REORDERING:
            return None
        movement.append(node)
    return None


def _output_axis(node: fx.Node) -> int:
    """The axis of the channels in the output of a layer."""
    row = row_of(node)
    assert row is not None
    return -1 if row.product in (Product.OUT_IN, Product.IN_OUT) else 1


def _keep(node: fx.Node, weight: fx.Node, bias: fx.Node, axis: int) -> None:
    """Lets the layer at ``node`` read these, and the batch norm behind it, moved up to it, stand for its output."""
    movement = movement_behind(node)
    assert movement is not None
    (norm,) = (node, *movement)[-1].users
    if movement:
        rank = norm.meta["val"].ndim
        norm.replace_all_uses_with(movement[-1])
        norm.args = (node, *norm.args[1:], axis, rank)
        movement[0].replace_input_with(node, norm)
        for moved in reversed(movement):
            norm.append(moved)
        norm.meta = {**norm.meta, "val": node.meta["val"]}
    _set_parameters(node, weight, bias)
    norm.target = kept_batch_norm
    site = value_site(node)
    set_value_site(norm, site)
    set_value_site(node, _named(site, "unnormalized"))


def _unkeep(norm: fx.Node) -> fx.Node:
    """Undoes ``_keep`` and, at the layer's last call, what it reads. Returns: the layer's call."""
    node = norm.args[0]
    assert isinstance(node, fx.Node)
    used, used_bias = _parameters(node)
    folded, new_bias = used.args[0], used_bias.args[0]
    assert isinstance(folded, fx.Node)
    assert isinstance(new_bias, fx.Node)
    weight, bias = used.args[1], used_bias.args[1]
    assert isinstance(weight, fx.Node)
    _set_parameters(node, weight, bias if isinstance(bias, fx.Node) else None)
    norm.target, norm.args = batch_norm, norm.args[:7]
    for made in (norm, node, weight, bias):
        if isinstance(made, fx.Node):
            set_value_site(made, None)
    for made in (used, used_bias, folded, new_bias):
        if not made.users:
            norm.graph.erase_node(made)
    return node


def _bias_of(node: fx.Node) -> fx.Node | None:
    row = row_of(node)
    assert row is not None
    assert row.bias is not None
    bias = node.args[row.bias] if row.bias < len(node.args) else None
    return bias if isinstance(bias, fx.Node) else None


def _parameters(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The weight and the bias that a layer reads."""
    row = row_of(node)
    assert row is not None
    assert row.data_arg is not None
    weight, bias = node.args[row.data_arg + 1], _bias_of(node)
    assert isinstance(weight, fx.Node)
    assert bias is not None
    return weight, bias


def _set_parameters(node: fx.Node, weight: fx.Node, bias: fx.Node | None) -> None:
    row = row_of(node)
    assert row is not None
    assert row.bias is not None
    assert row.data_arg is not None
    args = [*node.args, *[None] * (row.bias + 1 - len(node.args))]
    args[row.data_arg + 1], args[row.bias] = weight, bias
    node.args = tuple(args)


def _around(node: fx.Node, norm: fx.Node) -> dict[str, object]:
    """The module stack that a layer and its batch norm have in common: what both make belongs to neither."""
    stacks = [list((each.meta.get(MODULE_STACK) or {}).items()) for each in (node, norm)]
    common = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*stacks, strict=False))
    return dict(entry for entry, _ in common)


def _named(site: Site, what: str) -> Site:
    return Site(site.owner, site.op, what)
