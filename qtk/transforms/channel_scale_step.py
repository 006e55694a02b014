"""The step that multiplies a value by one number per channel in front of the layers that read it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from qtk.capture.holders import free_name, holder
from qtk.graph.captured_graph import CapturedGraph
from qtk.graph.graphs import graphs
from qtk.graph.op_table import CHANNEL_SCALE, row_of
from qtk.graph.sites import OP, OWNER, add_labels, join, label, value_site
from qtk.nn.channel_scale import ChannelScale
from qtk.transforms.steps import State


@dataclass(frozen=True, slots=True, eq=False)
class InsertChannelScale:
    """Inserts a ``ChannelScale`` between one value and layers that read it.

    Args:
        readers: sites of the values of those layers, all in one graph and all reading the same value.
        axis: the channels of the value.
        scale: name of the buffer with the numbers.
        numbers: [C], float64.
    """

    readers: tuple[str, ...]
    axis: int
    scale: str
    numbers: Tensor

    def update(self, state: State) -> None:
        """Sets the buffer, in the dtype that it was given at insertion."""
        state[self.scale] = self.numbers.to(state[self.scale])

    def edit(self, model: nn.Module) -> None:
        """Inserts the call, and the buffer with ones."""
        for path, graph in graphs(model).items():
            layers = [node for node in graph.graph.nodes if node.op in ("call_function", "call_module")
                      and value_site(node).name in self.readers and data_of(node) is not None]
            if layers:
                prefix = f"{path.partition('@')[0]}." if path else ""
                self._insert(graph, layers, self.scale.removeprefix(prefix))
                graph.recompile()

    def _insert(self, graph: CapturedGraph, layers: list[fx.Node], scale: str) -> None:
        first = layers[0]
        value = data_of(first)
        assert value is not None
        assert all(data_of(layer) is value for layer in layers), f"{self.readers} read several values"
        example = value.meta["val"]
        owner, _, leaf = scale.rpartition(".")
        like = next((p for p in graph.parameters() if p.is_floating_point()), torch.empty(0))
        ones = torch.ones(len(self.numbers), dtype=example.dtype, device=like.device)
        holder(graph, owner).register_buffer(leaf, ones)
        target = free_name(graph, join(owner, "channel_scale"))
        holder(graph, target.rpartition(".")[0]).add_module(target.rpartition(".")[2], ChannelScale(self.axis))
        with graph.graph.inserting_before(first):
            numbers = graph.graph.create_node("get_attr", scale)
            call = graph.graph.call_module(target, (value, numbers))
        for node in (numbers, call):
            node.meta = dict(first.meta)
        numbers.meta["val"] = example.fake_mode.from_tensor(ones)
        call.meta["val"] = example
        add_labels(call, **{OWNER: label(first, OWNER) or "", OP: free_op(graph, label(first, OWNER) or "")})
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


def free_op(graph: CapturedGraph, owner: str) -> str:
    """The name, unique inside ``owner``, of a new channel scale: ``channel_scale``, ``channel_scale_1``, …"""
    taken = {label(node, OP) for node in graph.graph.nodes if label(node, OWNER) == owner}
    name, ordinal = CHANNEL_SCALE.kind, 0
    while name in taken:
        ordinal += 1
        name = f"{CHANNEL_SCALE.kind}_{ordinal}"
    return name
