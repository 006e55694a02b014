"""The rules of ops with weights: what they contract, which parameters absorb the factors of input and output."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx

from qtk.channels.absorbers import ParameterOperand
from qtk.channels.channel_classes import PINNED, constant_labels, core
from qtk.channels.channel_findings import ChannelRead, ChannelWrite
from qtk.channels.label_state import Labels, LabelState, pinned
from qtk.nn.scale_shift import ScaleShift
from qtk.operators.op_row import OpRow, Product
from qtk.operators.targets import called_module, schema_arguments


def weighted(state: LabelState, node: fx.Node, row: OpRow) -> Labels:
    if row.product is not Product.IN_OUT:
        return _product(state, node, row, node.args[0], node.args[1], data_axis=_channel_axis(state, node, row))
    assert row.data_arg is not None
    left, right = node.args[row.data_arg : row.data_arg + 2]
    static = [state.flow.is_static(side) for side in (left, right) if isinstance(side, fx.Node)]
    ranks = [state.values[side].ndim for side in (left, right)]  # type: ignore[index]
    if min(ranks) < 2 or all(static):
        return pinned(state, node, row)
    if static[1]:
        return _product(state, node, row, left, right, data_axis=ranks[0] - 1)
    if static[0]:
        return _product(state, node, row, right, left, data_axis=ranks[1] - 2)
    return _product_of_activations(state, node, row, left, right)


def _channel_axis(state: LabelState, node: fx.Node, row: OpRow) -> int:
    rank = int(state.values[node.args[0]].ndim)  # type: ignore[index]
    return rank - 1 if row.product is Product.OUT_IN else rank - int(state.values[node.args[1]].ndim) + 1  # type: ignore[index]


def _product(state: LabelState, node: fx.Node, row: OpRow, data: object, weight: object, *, data_axis: int) -> Labels:
    assert isinstance(data, fx.Node)
    labels, operand = state.of(data), state.operand(weight)
    axes = [axis for axis in range(labels.ndim) if axis != data_axis]
    if state.flow.is_static(node) or state.operand(data) is not None:
        return pinned(state, node, row)
    if operand is None:
        channels = constant_labels((labels.shape[data_axis],))
        read = ChannelRead(node, data, data_axis, channels, None, None)
        state.findings.reads.append((state.graph, read))
        return pinned(state, node, row)
    inputs = state.classes.unify_along(labels, axes).reshape(-1)
    output_index, input_index, num_outputs, output_axis = _indices(state, node, row, operand, weight)
    use = state.absorbers.use_weight(operand, output_index, num_outputs, input_index, inputs)
    state.findings.reads.append(
        (state.graph, ChannelRead(node, data, data_axis, inputs, operand.name, use.input_index))
    )
    value = state.first_value(node)
    shape = [num_outputs if axis == output_axis else 1 for axis in range(value.ndim)]
    outputs = use.outputs.view(shape)
    bias = node.args[row.bias] if row.bias is not None and row.bias < len(node.args) else None
    if isinstance(bias, fx.Node):
        added = state.added(bias)
        per_channel = row.product is not Product.IN_OUT and added.numel() == num_outputs  # else it is broadcast
        state.classes.unify(outputs, added.view(shape) if per_channel else added)
    elif bias is not None:
        state.classes.pin(outputs)
    smallest = value.amin([axis for axis in range(value.ndim) if axis != output_axis]) if value.numel() else None
    write(state, ChannelWrite(node, row.kind, operand.name, state.name(bias), use.outputs, use.output_index, smallest))
    return state.spread(outputs, node)


def _indices(
    state: LabelState, node: fx.Node, row: OpRow, operand: ParameterOperand, weight: object
) -> tuple[Tensor, Tensor, int, int]:
    """Output and input channel of each element of a weight, how many outputs there are, and their axis."""
    shape, rank = operand.shape, state.first_value(node).ndim
    if row.product is Product.IN_OUT:
        is_right = weight is node.args[(row.data_arg or 0) + 1]
        out, into = (len(shape) - 1, len(shape) - 2) if is_right else (len(shape) - 2, len(shape) - 1)
        return _along(shape, out), _along(shape, into), shape[out], rank - 1 if is_right else rank - 2
    if row.product is Product.OUT_IN:
        return _along(shape, 0), _along(shape, 1), shape[0], rank - 1
    groups = schema_arguments(node)["groups"]
    assert isinstance(groups, int)
    first, second = _along(shape, 0), _along(shape, 1)
    within = second if groups == 1 else first // (shape[0] // groups) * shape[1] + second
    axis = rank - (len(shape) - 1)
    if row.product is Product.CONV:
        return first, within, shape[0], axis
    return within, first, shape[1] * groups, axis


def write(state: LabelState, written: ChannelWrite) -> None:
    """Records that a parameter scales the channels of what an op makes."""
    state.findings.writes.append((state.graph, written))


def _product_of_activations(state: LabelState, node: fx.Node, row: OpRow, left: object, right: object) -> Labels:
    """Passes the channel factors of one operand if the other is unscaled, such as v in softmax(q kᵀ) v."""
    bias = node.args[row.bias] if row.bias is not None else None
    for data, other, contracted in ((right, left, -2), (left, right, -1)):
        labels = state.of(data)
        if bool((core(state.of(other)) == PINNED).all()) and data is not other:
            outputs = state.classes.unify_along(labels, [labels.ndim + contracted])
            if isinstance(bias, fx.Node):
                state.classes.unify(outputs, state.added(bias))
            return state.spread(outputs, node)
    return pinned(state, node, row)


def columns(state: LabelState, node: fx.Node, row: OpRow) -> Labels:
    operand = state.operand(node.args[0])
    if operand is None:
        return pinned(state, node, row)
    use = state.absorbers.use_weight(operand, _along(operand.shape, 1), operand.shape[1])
    write(state, ChannelWrite(node, row.kind, operand.name, None, use.outputs, use.output_index))
    return state.spread(use.outputs, node)


def scale_shift(state: LabelState, node: fx.Node, row: OpRow) -> Labels:
    """The rule of ``ScaleShift``: the scale absorbs on both sides, the shift the factors of the output."""
    (data, scale, shift), module = node.args, called_module(node)
    operand = state.operand(scale)
    if not isinstance(module, ScaleShift) or operand is None or state.flow.is_static(node):
        return pinned(state, node, row)
    labels = state.of(data)
    axis = module.axis % labels.ndim
    inputs = state.classes.unify_along(labels, [other for other in range(labels.ndim) if other != axis]).reshape(-1)
    index = _along(operand.shape, 0)
    use = state.absorbers.use_weight(operand, index, index.numel(), index, inputs)
    state.classes.unify(use.outputs, state.added(shift))
    write(state, ChannelWrite(node, row.kind, operand.name, state.name(shift), use.outputs, use.output_index))
    return state.spread(use.outputs.view([-1 if other == axis else 1 for other in range(labels.ndim)]), node)


def channel_norm(state: LabelState, node: fx.Node, row: OpRow) -> Labels:
    rank = state.first_value(node).ndim
    return _norm(state, node, row, lambda labels: labels.view(-1, *[1] * (rank - 2)))


def trailing_norm(state: LabelState, node: fx.Node, row: OpRow) -> Labels:
    return _norm(state, node, row, lambda labels: labels)


def _norm(state: LabelState, node: fx.Node, row: OpRow, placed: Callable[[Tensor], Tensor]) -> Labels:
    def argument(position: int | None) -> object:
        return node.args[position] if position is not None and position < len(node.args) else None

    weight, bias = argument(row.weights[0]), argument(row.bias)
    operand = state.operand(weight)
    if operand is None:
        return pinned(state, node, row)
    state.pin_operands(node, but=(weight, bias))
    labels = state.absorbers.elements(operand)
    if isinstance(bias, fx.Node):
        state.classes.unify(labels, state.added(bias))
    index = torch.arange(operand.shape.numel()).view(operand.shape)
    if operand.positions is None:
        write(state, ChannelWrite(node, row.kind, operand.name, state.name(bias), labels.flatten(), index))
    return state.spread(placed(labels), node)


def attention(state: LabelState, node: fx.Node, row: OpRow) -> Labels:
    value = node.args[2]
    if value in node.args[:2] or state.operand(value) is not None:
        return pinned(state, node, row)
    state.pin_operands(node, but=(value,))
    labels, shape = state.of(value), state.first_value(node).shape
    per_channel = state.classes.unify_along(labels, [labels.ndim - 2])
    if labels.ndim > 2 and 1 < labels.shape[-3] < shape[-3]:  # grouped-query heads
        per_channel = per_channel.repeat_interleave(shape[-3] // labels.shape[-3], -3)
    return state.spread(per_channel, node)




def _along(shape: torch.Size, axis: int) -> Tensor:
    """The index along one axis, broadcastable to ``shape``."""
    return torch.arange(shape[axis]).view([-1 if other == axis else 1 for other in range(len(shape))])
