"""The step that multiplies a value by one number per channel in front of the layers that read it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, fx

from qtk.capture.holders import holder
from qtk.core.free_name import free_name
from qtk.core.site import Site
from qtk.graph.captured_graph import CapturedGraph
from qtk.graph.sites import GRAPH_PATH, OP, OWNER, add_labels, label
from qtk.nn.channel_scale import ChannelScale
from qtk.operators.lookup import row_of
from qtk.operators.op_table import CHANNEL_SCALE
from qtk.transforms.graph_editor import GraphEditor, add_module, beside
from qtk.transforms.steps import State


@dataclass(frozen=True, slots=True, eq=False)
class InsertChannelScale:
    """Inserts a ``ChannelScale`` between one value and layers that read it.

    Args:
        readers: sites of the values that the layers compute; all read the same value.
        axis: the channels of the value.
        scale: name of the buffer with the numbers.
        like: name of a parameter, whose dtype and device the buffer gets.
        numbers: [C], float64.
    """

    readers: tuple[Site, ...]
    axis: int
    scale: str
    like: str
    numbers: Tensor

    def update(self, state: State) -> None:
        """Sets the buffer."""
        state[self.scale] = self.numbers.to(state[self.like])

    def edit(self, editor: GraphEditor) -> None:
        """Inserts the call, with ones for numbers."""
        layers: dict[CapturedGraph, list[fx.Node]] = {}
        for site in self.readers:
            for graph, node in editor.makers(site):
                layers.setdefault(graph, []).append(node)
        for graph, nodes in layers.items():
            self._insert(graph, nodes, torch.ones_like(self.numbers).to(editor.members.tensor(self.like)))

    def _insert(self, graph: CapturedGraph, layers: list[fx.Node], ones: Tensor) -> None:
        first = layers[0]
        value = data_of(first)
        assert value is not None
        assert all(data_of(layer) is value for layer in layers), f"{self.readers} read several values"
        path = label(first, GRAPH_PATH)
        scale = self.scale.removeprefix(f"{path}." if path else "")
        example, (owner, _, leaf) = value.meta["val"], scale.rpartition(".")
        if leaf not in holder(graph, owner)._buffers:  # of another graph of the same module
            holder(graph, owner).register_buffer(leaf, ones)
        target = add_module(graph, beside(scale, CHANNEL_SCALE.kind), ChannelScale(self.axis))
        with graph.graph.inserting_before(first):
            numbers = graph.graph.create_node("get_attr", graph.target(scale))
            call = graph.graph.call_module(target, (value, numbers))
        for node in (numbers, call):
            node.meta = dict(first.meta)
        numbers.meta["val"], call.meta["val"] = example.fake_mode.from_tensor(ones, static_shapes=True), example
        add_labels(call, **{OP: free_op(graph, label(first, OWNER))})
        for layer in layers:
            row = row_of(layer)
            assert row is not None
            assert row.data_arg is not None
            layer.update_arg(row.data_arg, call)


def data_of(node: fx.Node) -> fx.Node | None:
    """The value that a weighted op multiplies with its weight; ``None`` if ``node`` is no such op."""
    row = row_of(node)
    if row is None or not row.weights or row.data_arg is None or len(node.args) <= row.data_arg:
        return None
    value = node.args[row.data_arg]
    return value if isinstance(value, fx.Node) else None


def free_op(graph: CapturedGraph, owner: str | None) -> str:
    """The name of a new channel scale, unique inside ``owner``: ``channel_scale``, ``channel_scale_1`` and so on."""
    taken = {label(node, OP) for node in graph.graph.nodes if label(node, OWNER) == owner}
    return free_name(CHANNEL_SCALE.kind, taken)
