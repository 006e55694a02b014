"""Weights that are views of a parameter: one expert of a stack, one of three projections stored in one matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, fx

from qtk.graph.evaluate import evaluate
from qtk.graph.flow import Flow, maker
from qtk.graph.insert import quantizer_called
from qtk.operators.targets import attribute


@dataclass(frozen=True, slots=True, eq=False)
class ParameterView:
    """What a quantizer reads of a parameter.

    Args:
        tensor: the weight, in the memory of the parameter, so that what is written into it is written there.
        parameter: the whole parameter.
        moves: the ops between them.
    """

    tensor: Tensor
    parameter: Tensor
    moves: tuple[fx.Node, ...] = ()


def parameter_view(graph: fx.GraphModule, flow: Flow, value: fx.Node) -> ParameterView | None:
    """The weight that a quantizer reads at ``value``; ``None`` if it is computed, copied, or also read elsewhere."""
    source = flow.root(value)
    if source.op != "get_attr":
        return None
    parameter = attribute(graph, str(source.target))
    if source is value:
        return ParameterView(parameter, parameter)
    with torch.no_grad():
        tensor = evaluate(value, {source: parameter.detach()})
    is_view = tensor.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr() and all(
        step or length < 2 for step, length in zip(tensor.stride(), tensor.shape, strict=True)
    )
    if not is_view or not _are_apart(flow, source, parameter):
        return None
    moves: list[fx.Node] = []
    while value is not source:
        moves += dict.fromkeys((value, maker(value)))
        carried = flow.carried(value)
        assert carried is not None
        value = carried
    return ParameterView(tensor, parameter, tuple(reversed(moves)))


def _are_apart(flow: Flow, source: fx.Node, parameter: Tensor) -> bool:
    """Says whether quantizers alone read a parameter, and no element of it is read by two."""
    readers = list(flow.readers(source))
    if any(quantizer_called(reader.user) is None for reader in readers):
        return False
    indices = torch.arange(parameter.numel()).reshape(parameter.shape)
    read = torch.cat([evaluate(reader.value, {source: indices}).flatten() for reader in readers])
    return bool((torch.bincount(read) < 2).all())
