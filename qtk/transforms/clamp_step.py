"""The step that scales the bounds of a clamp, channel by channel, and the steps that a model's factors need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from qtk.capture.holders import holder
from qtk.channels.channel_scales import ChannelScales, ClampedValue
from qtk.core.site import Site
from qtk.graph.captured_graph import CapturedGraph
from qtk.graph.graphs import graphs
from qtk.graph.sites import join, value_site
from qtk.nn.channel_clamp import ChannelClamp
from qtk.operators.targets import attribute, called_module
from qtk.transforms.graph_editor import GraphEditor, add_module, beside
from qtk.transforms.named_tensors import NamedTensors
from qtk.transforms.steps import State


@dataclass(frozen=True, slots=True, eq=False)
class ScaleClamp:
    """Multiplies the bounds of a clamp by one factor per channel; the clamp becomes a ``ChannelClamp`` first.

    Args:
        call: site of the value of the clamp.
        axis: the channel axis.
        lower: its lower bound before the first such step, ``None`` if it has none.
        upper: its upper bound, likewise.
        lower_name: name of the buffer of lower bounds, ``None`` if there is none.
        upper_name: of the upper bounds.
        factor: [C], float64.
        like: name of a parameter that has the dtype and device of the model.
    """

    call: Site
    axis: int
    lower: float | None
    upper: float | None
    lower_name: str | None
    upper_name: str | None
    factor: Tensor
    like: str

    def update(self, state: State) -> None:
        """Multiplies in float64 and rounds once."""
        for name, bound in ((self.lower_name, self.lower), (self.upper_name, self.upper)):
            if name is not None:
                like = state[self.like]
                old = state[name] if name in state else _bounds(bound, len(self.factor), like)
                state[name] = (old.double() * self.factor.to(old.device)).to(old.dtype)

    def edit(self, editor: GraphEditor) -> None:
        """Replaces the clamp in every graph by a ``ChannelClamp`` with the bounds it has."""
        paths = {id(graph): path.partition("@")[0] for path, graph in graphs(editor.model).items()}
        like = editor.members.tensor(self.like)
        added: dict[str, Tensor] = {}
        for graph, _ in list(editor.makers(self.call)):
            node = _maker(graph, self.call)  # another step may have replaced it since
            if isinstance(called_module(node), ChannelClamp):
                continue
            path = paths[id(graph)]
            bounds: list[fx.Node | None] = []
            for name, bound in ((self.lower_name, self.lower), (self.upper_name, self.upper)):
                if name is None:
                    bounds.append(None)
                else:
                    new = added.setdefault(name, _bounds(bound, len(self.factor), like))
                    bounds.append(_read(graph, name.removeprefix(f"{path}."), node, new))
            beside_name = (self.lower_name or self.upper_name or "").removeprefix(f"{path}.")
            target = add_module(graph, beside(beside_name, "channel_clamp"), ChannelClamp(self.axis))
            with node.graph.inserting_before(node):
                call = node.graph.call_module(target, (node.args[0], *bounds))
            call.meta = dict(node.meta)
            node.replace_all_uses_with(call)
            node.graph.erase_node(node)


def clamp_steps(scales: ChannelScales, factors: Tensor, members: NamedTensors) -> Iterator[ScaleClamp]:
    """The steps for every clamp that scaled channels pass through, one for each site.

    Args:
        scales: of the model.
        factors: float64 [num_variables], the factor of each class.
        members: of the model.
    """
    padded = torch.cat([factors, factors.new_ones(1)])  # class −1 has the factor 1
    like = scales.outputs[0].weight if scales.outputs else ""
    seen = set()
    for clamp in scales.clamps:
        factor, site = padded[clamp.variables], value_site(clamp.node)
        if bool((factor == 1).all()) or site in seen:
            continue
        seen.add(site)
        lower, upper = _names(clamp, members)
        yield ScaleClamp(site, clamp.channel_axis, clamp.lower, clamp.upper, lower, upper, factor, like)


def _maker(graph: CapturedGraph, site: Site) -> fx.Node:
    nodes: list[fx.Node] = [node for node in graph.graph.nodes if node.op in ("call_function", "call_module")]
    return next(node for node in nodes if value_site(node) == site)


def _bounds(bound: float | None, channels: int, like: Tensor) -> Tensor:
    assert bound is not None, "a ChannelClamp has its bounds already"
    return torch.full((channels,), bound, dtype=like.dtype, device=like.device)


def _read(graph: CapturedGraph, name: str, like: fx.Node, new: Tensor) -> fx.Node:
    """A node that reads the buffer called ``name``, which is added as ``new`` if the graph has none."""
    owner, _, leaf = name.rpartition(".")
    module = holder(graph, owner)
    if leaf not in module._buffers:
        module.register_buffer(leaf, new)
    first = next(node for node in graph.graph.nodes if node.op != "placeholder")
    with graph.graph.inserting_before(first):
        node = graph.graph.create_node("get_attr", graph.target(name))
    node.meta = dict(like.meta)
    node.meta["val"] = like.meta["val"].fake_mode.from_tensor(attribute(graph, name), static_shapes=True)
    return node


def _names(clamp: ClampedValue, members: NamedTensors) -> tuple[str | None, str | None]:
    """Names of the buffers of the lower and the upper bounds; ``None`` where there is no bound."""
    if isinstance(called_module(clamp.node), ChannelClamp):
        _, lower, upper = (*clamp.node.args, None)[:3]
        return _name(clamp.graph, lower, members), _name(clamp.graph, upper, members)
    site = value_site(clamp.node)
    owner = join(site.owner, site.op).replace("@", "_")
    return (
        None if clamp.lower is None else _free(join(owner, "lower"), members),
        None if clamp.upper is None else _free(join(owner, "upper"), members),
    )


def _name(graph: CapturedGraph, node: object, members: NamedTensors) -> str | None:
    return members.name(attribute(graph, str(node.target))) if isinstance(node, fx.Node) else None


def _free(name: str, members: NamedTensors) -> str:
    while name in members:
        name += "_bound"
    return name
