"""Captures the parts of composites (the cell of an LSTM, the core of attention) as graphs.

A composite runs torch's fused kernel while every quantizer inside it is bypassed. Its parts are captured like models,
so that planning and insertion treat their ops like any others.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim

from qtk.calls.inputs import is_free
from qtk.capture.canonicalize import canonicalize
from qtk.capture.composites import Composite, composite_called
from qtk.capture.torch_export import capture
from qtk.capture.train_mode.train_only import TrainOnly, as_ops
from qtk.errors import CaptureError
from qtk.graph.captured_graph import CapturedGraph
from qtk.graph.sites import name_sites, value_site
from qtk.operators.lookup import row_of
from qtk.torch_private import DropoutBase, has_length_hint, length_hint

DECIDED_BY_DATA = 2
"""A length that torch.export leaves free."""


def open_composites(model: fx.GraphModule) -> tuple[str, ...]:
    """Captures the parts of every composite that ``model`` calls. Changes the composites.

    Composites with equal settings and equal inputs are captured once and get copies of the graphs.

    Returns: the site of each composite whose parts could not be captured, with the reason.
    """
    known: dict[object, dict[str, CapturedGraph] | CaptureError] = {}
    closed = []
    for node in model.graph.nodes:
        module, row = composite_called(node), row_of(node)
        if module is None or row is None:
            continue
        key = (repr(module), str(_values(node)))
        if key not in known:
            try:
                known[key] = {path: _captured(*part) for path, part in _parts(module, node).items()}
            except CaptureError as error:
                known[key] = error
        place, parts = value_site(node).name.partition(":")[0], known[key]
        if isinstance(parts, CaptureError):
            closed.append(f"{place}: {parts}")
            continue
        for path, graph in parts.items():
            inside = copy.deepcopy(graph)
            name_sites(inside.graph, f"{place}.{path}", row.inside or "")
            module.set_submodule(path, inside)
    return tuple(closed)


def _parts(module: Composite, node: fx.Node) -> dict[str, tuple[nn.Module, tuple[Any, ...], Any]]:
    """Path → a part of ``module``, its example arguments, and their dynamic shapes."""
    arguments: Any = fx.node.map_arg(node.args, _example)
    free = {_hint(size) for value in _values(node) for size in value.shape if is_free(size)}
    parts = {}
    for path, (part, inputs) in module.parts(*arguments).items():
        shapes = tuple(
            {axis: Dim.AUTO for axis, size in enumerate(value.shape) if size in free} if isinstance(value, Tensor)
            else None
            for value in inputs
        )
        parts[path] = (part, inputs, shapes)
    return parts


def _example(node: fx.Node) -> Any:
    value = node.meta["val"]
    return torch.zeros([_hint(size) for size in value.shape], dtype=value.dtype, device=value.device)


def _captured(part: nn.Module, inputs: tuple[Any, ...], shapes: Any) -> CapturedGraph:
    dropouts: TrainOnly = {module: False for module in part.modules() if isinstance(module, DropoutBase)}
    with as_ops(part, dropouts):
        captured = capture(part.eval(), inputs, {}, shapes)
    return canonicalize(captured.program, part, CapturedGraph, train_only=dropouts)[0]


def _values(node: fx.Node) -> list[Tensor]:
    return [value for argument in node.all_input_nodes if isinstance(value := argument.meta.get("val"), Tensor)]


def _hint(size: int | torch.SymInt) -> int:
    """The length in the example inputs, or some free one of a size that data decide (elements of packed sequences)."""
    return length_hint(size) if has_length_hint(size) else DECIDED_BY_DATA
