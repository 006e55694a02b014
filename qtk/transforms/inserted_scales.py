"""Multiplications inserted for SmoothQuant where no parameter can absorb the factors."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor, fx, nn

from qtk.algorithms.smooth_quant import at
from qtk.channels.channel_scales import WeightedInput
from qtk.core.plan import SitePlan
from qtk.graph.flow import Flow
from qtk.graph.graphs import graphs
from qtk.graph.sites import OWNER, join, label, value_site
from qtk.operators.lookup import op_name
from qtk.operators.op_row import Role
from qtk.operators.targets import attribute
from qtk.transforms.channel_scale_step import InsertChannelScale
from qtk.transforms.named_tensors import NamedTensors
from qtk.transforms.steps import ScaleParameter, Step

LEAST_WORK = 32
"""Multiplications that layers must make for each one inserted in front of them."""

SCALE = "smooth_scale"
"""Name of the inserted numbers, a buffer of the first layer that reads them."""


def reason_against(
    model: nn.Module, readings: Sequence[WeightedInput], weights: Sequence[Tensor], decided: SitePlan | None,
    work: float, flow: Flow,
) -> str | None:
    """Says why no multiplication is inserted in front of the layers that read one value; ``None`` if it may be.

    Args:
        model: the model.
        readings: the layers that read the value.
        weights: their weights.
        decided: how the value is quantized.
        work: multiplications that the layers make for each element of the value.
        flow: of the graph of the value.
    """
    value = readings[0].value
    root, layers = flow.root(value), {item.node for item in readings}
    row = flow.row(root)
    if decided is None:
        return "it is not quantized"
    if root.op == "placeholder":
        return "it is a model input"
    if flow.is_static(root):
        return "it is computed from parameters"
    if row is not None and row.role is Role.MERGE:
        return "it shares its encoding with the values it merges"
    if row is not None and row.inside is not None:
        return f"it is quantized inside {op_name(root)}"
    if value is not root and any(port.user not in layers for port in flow.readers(root)):
        return f"the layers read it behind data movement, and others read {value_site(root)}"
    for weight in weights:
        if not _only_read_by(model, weight, layers):
            return "its weight is read elsewhere too"
    if work < LEAST_WORK:
        return f"its layers make {work:.0f} multiplications an element, {LEAST_WORK} are required"
    return None


def inserting_steps(model: nn.Module, readings: Sequence[WeightedInput], scale: Tensor) -> list[Step]:
    """The steps that divide a value by ``scale`` in front of the layers that read it.

    Shape: ``scale`` [C].
    """
    first = readings[0]
    paths = {id(module): path for path, module in model.named_modules()}
    owner = (label(first.node, OWNER) or "").partition("@")[0]
    with contextlib.suppress(AttributeError):  # the layer may be a function called in a place that is no module
        owner = paths[id(model.get_submodule(owner))]
    name, ordinal, members = join(owner, SCALE), 0, NamedTensors(model)
    while name in members:
        ordinal += 1
        name = join(owner, f"{SCALE}_{ordinal}")
    sites = tuple(value_site(item.node) for item in readings)
    assert first.weight is not None
    steps: list[Step] = [InsertChannelScale(sites, first.channel_axis, name, first.weight, 1 / scale.cpu())]
    seen: list[tuple[str, Tensor]] = []
    for item in readings:
        assert item.weight is not None
        assert item.weight_index is not None
        if not any(item.weight == name and torch.equal(item.weight_index, index) for name, index in seen):
            seen.append((item.weight, item.weight_index))
            steps.append(ScaleParameter(item.weight, at(scale.cpu(), item.weight_index)))
    return steps


def _only_read_by(model: nn.Module, tensor: Tensor, layers: set[fx.Node]) -> bool:
    """Says whether the graphs of ``model`` read ``tensor`` only in the ops ``layers``."""
    for graph in graphs(model).values():
        reads = [node for node in graph.graph.find_nodes(op="get_attr") if attribute(graph, str(node.target)) is tensor]
        flow = Flow(graph.graph) if reads else None
        if flow is not None and any(port.user not in layers for node in reads for port in flow.readers(node)):
            return False
    return True
