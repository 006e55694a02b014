"""Builds the graphs of recurrent nets that are called with packed sequences.

``torch.export`` cannot capture them: the number of sequences at each time step is in ``PackedSequence.batch_sizes``, a
tensor, so shapes depend on data.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.rnn import PackedSequence

from qtk.calls.calls import Call
from qtk.capture.composites import sequence_composite
from qtk.capture.holders import hold
from qtk.capture.prepared_model import PreparedGraph
from qtk.capture.recurrent_tracing import zero_states
from qtk.graph.sites import name_sites
from qtk.torch_private import FakeTensorMode


class PackedRecurrent(PreparedGraph):
    """The graph of a recurrent net over (data, batch_sizes, *states), called like the net itself."""

    def __call__(self, input: PackedSequence, hx: Any = None) -> tuple[PackedSequence, Any]:
        """Returns: the outputs, packed like ``input``, and the last states, as ``nn.RNNBase`` returns them."""
        data, sizes, order, back = input
        states = self._start(data, int(sizes[0])) if hx is None else hx if isinstance(hx, tuple) else (hx,)
        if hx is not None and order is not None:
            states = tuple(state.index_select(1, order) for state in states)
        output, *last = super().__call__(data, sizes, *states)
        if back is not None:
            last = [state.index_select(1, back) for state in last]
        return PackedSequence(output, sizes, order, back), tuple(last) if len(last) > 1 else last[0]

    @property
    def free_axes(self) -> dict[str, list[int]]:
        """Input → the axes whose length varies: number of elements, time steps and sequences."""
        data, sizes, *states = (str(node.target) for node in self.graph.find_nodes(op="placeholder"))
        return {data: [0], sizes: [0]} | {state: [1] for state in states}

    def _start(self, data: Tensor, batch: int) -> tuple[Tensor, ...]:
        shapes = [node.meta["val"].shape for node in self.graph.find_nodes(op="placeholder")[2:]]
        return tuple(data.new_zeros(steps, batch, width) for steps, _, width in shapes)


def build_packed(module: nn.Module, call: Call, place: str) -> PreparedGraph:
    """Builds the graph of ``module`` for the packed sequence of ``call``."""
    assert isinstance(module, nn.RNNBase)
    packed, *_ = (arg for arg in (*call.args, *call.kwargs.values()) if isinstance(arg, PackedSequence))
    composite, weights, biases = sequence_composite(module)
    root = hold(module)
    root.add_module("recurrence", composite)
    graph, mode = fx.Graph(), FakeTensorMode()

    def node_for(op: str, target: str, value: Tensor) -> fx.Node:
        node = graph.create_node(op, target)
        node.meta["val"] = mode.from_tensor(value)
        return node

    data = node_for("placeholder", "data", packed.data)
    sizes = node_for("placeholder", "batch_sizes", packed.batch_sizes)
    starts = list(zero_states(module, packed.data, int(packed.batch_sizes[0])))
    states = [node_for("placeholder", f"state_{index}", value) for index, value in enumerate(starts)]
    tensors = [[module.get_parameter(name) for name in names] for names in (weights, biases)]
    nodes = [[node_for("get_attr", name, module.get_parameter(name)) for name in names] for names in (weights, biases)]
    call_node = graph.call_module("recurrence", (data, states, *nodes, sizes))
    with torch.no_grad():
        results = composite(packed.data, starts, *tensors, packed.batch_sizes)
    call_node.meta["val"] = tuple(mode.from_tensor(result) for result in results)
    outputs = []
    for index, value in enumerate(call_node.meta["val"]):
        element = graph.call_function(operator.getitem, (call_node, index))
        element.meta["val"] = value
        outputs.append(element)
    graph.output(tuple(outputs))
    built = PackedRecurrent(root, graph)
    name_sites(built.graph, place)
    return built
