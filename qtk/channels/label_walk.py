"""Runs a captured graph with label tensors beside the values: which channels must have the same factor.

What an op does with factors is in its row of the op table (``Scaling``). Every rule is a method of that name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from qtk.channels.absorbers import ParameterOperand
from qtk.channels.channel_classes import PINNED, ZERO, compact, constant_labels, core
from qtk.channels.channel_findings import ChannelWrite, Clamp
from qtk.channels.label_state import Labels, LabelState, is_fixed_point, is_float, pinned
from qtk.channels.weight_rules import attention, channel_norm, columns, scale_shift, trailing_norm, weighted, write
from qtk.graph.evaluate import evaluate_node
from qtk.graph.flow import reads_shape_only
from qtk.nn.channel_clamp import ChannelClamp
from qtk.operators.lookup import row_of
from qtk.operators.op_row import OpRow, Scaling
from qtk.operators.targets import aten_name, attribute, called_module, clamp_bounds, schema_arguments
from qtk.torch_private import pytree


class LabelWalk(LabelState):
    """The walk through one graph, for one call of it.

    Args: as for ``LabelState``.
    """

    @torch.no_grad()
    def run(self, inputs: list[object]) -> None:
        """Walks through the graph for a call with these inputs, flat, in the order of the placeholders."""
        remaining = {node: len(node.users) for node in self.graph.graph.nodes}
        leaves = iter(inputs)
        for node in self.graph.graph.nodes:
            if node.op == "output":
                self.pin_operands(node)
            elif node.op == "placeholder":
                self.values[node] = next(leaves)
                self.labels[node] = self.pinned_result(node)
            else:
                self.values[node] = evaluate_node(node, self.values.__getitem__)
                self.labels[node] = _checked(self._label(node), self.values[node])
                if isinstance(labels := self.labels[node], Tensor):
                    self.findings.values.append((node, core(labels)))
            for read in node.all_input_nodes:
                remaining[read] -= 1
                if not remaining[read]:
                    del self.values[read], self.labels[read]

    def _label(self, node: fx.Node) -> Labels:
        if node.op == "get_attr":
            tensor = attribute(self.graph, str(node.target))
            name = self.absorbers.name(tensor)
            return self.pinned_result(node) if name is None else ParameterOperand(name, tensor.shape)
        row = row_of(node)
        if row is None and reads_shape_only(node):
            return self.pinned_result(node)
        return pinned(self, node, None) if row is None else RULES[row.scales_as](self, node, row)


def _constant(state: LabelState, node: fx.Node, row: OpRow) -> Labels:
    value = state.values[node]
    if is_float(value) and not any(map(state.varies, node.args[1:])) and bool(((value == 0) | value.isinf()).all()):
        return constant_labels(value.shape, ZERO)
    return state.pinned_result(node)


def _kept(state: LabelState, node: fx.Node, row: OpRow) -> Labels:
    data = node.args[0]
    if not is_float(state.first_value(node)):
        return pinned(state, node, row)
    if (operand := state.operand(data)) is not None and row.kind == "identity":
        return operand
    if state.flow.is_static(node):
        return pinned(state, node, row)
    state.pin_operands(node, but=(data,))
    return state.result(node, state.of(data))


def _clamped(state: LabelState, node: fx.Node, row: OpRow) -> Labels:
    module = called_module(node)
    bounds = (None, None) if isinstance(module, ChannelClamp) else clamp_bounds(node)
    if bounds is None or state.flow.is_static(node):
        return pinned(state, node, row)
    labels = state.of(node.args[0])
    if module is None and all(bound in (None, 0) for bound in bounds):
        return labels
    small = core(labels)
    axes = [axis for axis, length in enumerate(small.shape) if length > 1]
    if isinstance(module, ChannelClamp):
        axes = [*{*axes, module.axis % small.ndim}]
    axes = axes or [min(1, small.ndim - 1)]
    if len(axes) > 1 or not small.ndim:
        return pinned(state, node, row)
    channels = small.flatten().expand(labels.shape[axes[0]])
    state.findings.clamps.append((state.graph, Clamp(node, axes[0], channels, *bounds)))
    return labels


def _moved(state: LabelState, node: fx.Node, row: OpRow) -> Labels:
    if row.kind == "getitem":
        source, index = node.args
        assert isinstance(source, fx.Node)
        return state.labels[source][index]  # type: ignore[index]
    if state.flow.is_static(node):
        return _moved_parameter(state, node, row)
    data = node.args[0]
    if row.kind == "masked_fill":
        return _masked(state, node)
    if any(state.labels[read] is None and state.varies(read) for read in node.all_input_nodes):
        if row.kind != "gather" or not isinstance(data, fx.Node) or (axes := _gathered_axes(state, node)) is None:
            return pinned(state, node, row)
        unified = state.classes.unify_along(state.of(data), axes).expand(state.values[data].shape)
        result = _evaluated(state, node, lambda read: unified if read is data else state.of(read))
    else:
        result = _evaluated(state, node, state.of)
    labels: Labels = pytree.tree_map(compact, result)
    return labels


def _moved_parameter(state: LabelState, node: fx.Node, row: OpRow) -> Labels:
    operands = [state.labels[read] for read in node.all_input_nodes if state.labels[read] is not None]
    operand = operands[0] if len(operands) == 1 else None
    if not isinstance(operand, ParameterOperand) or row.kind == "masked_fill":
        return pinned(state, node, row)
    name, positions = operand.name, operand.positions
    if positions is None:
        positions = torch.arange(operand.shape.numel(), dtype=torch.float64).view(operand.shape)
    result = _evaluated(state, node, lambda _: positions)
    labels: Labels = pytree.tree_map(lambda part: ParameterOperand(name, part.shape, part), result)
    return labels


def _gathered_axes(state: LabelState, node: fx.Node) -> list[int] | None:
    """The axes along which an op picks elements by an index; ``None`` if it is not known."""
    data, by_dim = node.args[0], schema_arguments(node).get("dim")
    rank = state.values[data].ndim  # type: ignore[index]
    if isinstance(by_dim, int):
        return [by_dim % rank]
    indices = schema_arguments(node).get("indices")
    if not isinstance(indices, (list, tuple)):
        return None
    axes, axis = [], 0
    for index in indices:
        tensor = state.values[index] if isinstance(index, fx.Node) else None
        span = tensor.ndim if isinstance(tensor, Tensor) and tensor.dtype == torch.bool else 1
        axes += list(range(axis, axis + span)) if tensor is not None else []
        axis += span
    return axes


def _masked(state: LabelState, node: fx.Node) -> Labels:
    """Masking with 0 or −∞ keeps factors; another number pins all that may be masked."""
    data, fill = node.args[0], node.args[2]
    number = state.values[fill] if isinstance(fill, fx.Node) else fill
    if state.varies(fill) or not is_fixed_point(float(number)):  # type: ignore[arg-type]
        return pinned(state, node, None)
    return state.spread(state.of(data), node)


def _evaluated(state: LabelState, node: fx.Node, labels: Callable[[fx.Node], Tensor]) -> Any:
    """The result of an op of data movement on label tensors."""
    def read(argument: fx.Node) -> Any:
        value = state.values[argument]
        if state.labels[argument] is not None:
            return labels(argument)
        return value.cpu() if isinstance(value, Tensor) else value

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), read)
    assert callable(node.target)
    try:
        result = node.target(*args, **kwargs)
    except RuntimeError:  # a view of what is stored with stride 0
        args = pytree.tree_map_only(Tensor, Tensor.contiguous, args)
        result = node.target(*args, **kwargs)
    return list(result) if isinstance(result, (list, tuple)) else result


def _windowed(state: LabelState, node: fx.Node, row: OpRow) -> Labels:
    labels = state.of(node.args[0])
    space = re.search(r"(\d)d", aten_name(node.target) or "")
    if space is None or state.flow.is_static(node):
        return pinned(state, node, row)
    axes = range(labels.ndim - int(space[1]), labels.ndim)
    return state.spread(state.classes.unify_along(labels, axes), node)


def _reduced(state: LabelState, node: fx.Node, row: OpRow) -> Labels:
    if state.flow.is_static(node) or not is_float(state.first_value(node)):
        return pinned(state, node, row)
    labels = state.of(node.args[0])
    dim: Any = schema_arguments(node).get("dim")
    listed = dim if isinstance(dim, (list, tuple)) else [] if dim is None else [dim]
    axes = [axis % max(labels.ndim, 1) for axis in listed] or list(range(labels.ndim))
    if dim is None and "pick" in row.names and "dim" in schema_arguments(node):
        axes = [labels.ndim - 1]
    reduced = state.classes.unify_along(labels, axes)
    if state.first_value(node).ndim < labels.ndim:
        kept = [length for axis, length in enumerate(reduced.shape) if axis not in axes]
        reduced = reduced.reshape(kept)
    return state.spread(reduced, node)


def _added(state: LabelState, node: fx.Node, row: OpRow) -> Labels:
    if state.flow.is_static(node):
        return pinned(state, node, row)
    if row.kind == "where":
        _, *arguments = node.args
    else:
        arguments = list(node.args[:2])
    labels = [state.of(argument) for argument in arguments]
    return state.spread(state.classes.unify(*labels), node)


def _multiplied(state: LabelState, node: fx.Node, row: OpRow) -> Labels:
    left, right = node.args[:2]
    if left is right or state.flow.is_static(node):
        return pinned(state, node, row)
    for operand, data in ((state.operand(left), right), (state.operand(right), left)):
        if operand is not None and operand.shape.numel() > 1:
            return _scaled(state, node, row, operand, state.of(data))
    a, b = state.of(left), state.of(right)
    if bool((core(b) == PINNED).all()):
        return state.spread(a, node)
    if bool((core(a) == PINNED).all()):
        return state.spread(b, node)
    a, b = torch.broadcast_tensors(a, b)  # type: ignore[no-untyped-call]
    small_a, small_b = (side.flatten() for side in torch.broadcast_tensors(core(a), core(b)))  # type: ignore[no-untyped-call]
    pairs, which = torch.stack([small_a, small_b]).unique(dim=1, return_inverse=True)  # type: ignore[no-untyped-call]
    out = state.classes.new(pairs.shape[1])
    out[(pairs == ZERO).any(0)] = ZERO
    state.findings.products.append((pairs[0], pairs[1], out))
    shape = torch.broadcast_shapes(core(a).shape, core(b).shape)  # type: ignore[no-untyped-call]
    return state.spread(out[which].view(shape), node)


def _scaled(state: LabelState, node: fx.Node, row: OpRow, operand: ParameterOperand, data: Tensor) -> Labels:
    """X · p with a parameter p per channel, which absorbs factors on both sides."""
    value = state.first_value(node)
    lengths = (1,) * (value.ndim - len(operand.shape)) + tuple(operand.shape)
    axes = [axis for axis, length in enumerate(lengths) if length == 1]
    inputs = state.classes.unify_along(data.expand(value.shape), axes).reshape(-1)
    index = torch.arange(operand.shape.numel()).view(operand.shape)
    use = state.absorbers.use_weight(operand, index, index.numel(), index, inputs)
    write(state, ChannelWrite(node, row.kind, operand.name, None, use.outputs, use.output_index))
    return state.spread(use.outputs.view(lengths), node)


def _divided(state: LabelState, node: fx.Node, row: OpRow) -> Labels:
    numerator = node.args[0]
    if state.flow.is_static(node) or schema_arguments(node).get("rounding_mode") is not None:
        return pinned(state, node, row)
    state.pin_operands(node, but=(numerator,))
    if numerator in node.args[1:]:
        state.pin(numerator)
    return state.spread(state.of(numerator), node)


def _checked(labels: Labels, value: Any) -> Labels:
    """``labels``, which must have the shapes of the values they belong to."""
    if isinstance(labels, list):
        return [_checked(label, part) for label, part in zip(labels, value, strict=True)]
    assert labels is None or labels.shape == value.shape, f"labels of shape {labels.shape} for {value.shape}"
    return labels


RULES: Mapping[Scaling, Callable[[LabelState, fx.Node, OpRow], Labels]] = {
    Scaling.PINNED: pinned,
    Scaling.KEPT: _kept,
    Scaling.CLAMPED: _clamped,
    Scaling.MOVED: _moved,
    Scaling.WINDOWED: _windowed,
    Scaling.REDUCED: _reduced,
    Scaling.ADDED: _added,
    Scaling.MULTIPLIED: _multiplied,
    Scaling.DIVIDED: _divided,
    Scaling.WEIGHTED: weighted,
    Scaling.COLUMNS: columns,
    Scaling.SCALE_SHIFT: scale_shift,
    Scaling.CHANNEL_NORM: channel_norm,
    Scaling.TRAILING_NORM: trailing_norm,
    Scaling.ATTENTION: attention,
    Scaling.CONSTANT: _constant,
}
