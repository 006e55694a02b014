"""The steps that scale clamps, with names for the buffers of their bounds."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, fx

from qtk.graph.captured_graph import CapturedGraph
from qtk.graph.sites import join, value_site
from qtk.graph.targets import attribute, called_module
from qtk.nn.channel_clamp import ChannelClamp
from qtk.transforms.channel_scales import ChannelScales, ClampedValue
from qtk.transforms.clamp_step import ScaleClamp
from qtk.transforms.members import Members


def clamp_steps(scales: ChannelScales, factors: Tensor, members: Members) -> Iterator[ScaleClamp]:
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


def _names(clamp: ClampedValue, members: Members) -> tuple[str | None, str | None]:
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


def _name(graph: CapturedGraph, node: object, members: Members) -> str | None:
    return members.name(attribute(graph, str(node.target))) if isinstance(node, fx.Node) else None


def _free(name: str, members: Members) -> str:
    while name in members:
        name += "_bound"
    return name
