"""Ops without a row in the op table."""

from __future__ import annotations

import operator

import torch
from torch import fx, nn

from qtk.graph.flow import Flow
from qtk.graph.graphs import graphs
from qtk.graph.sites import EXCLUDED, label
from qtk.graph.written_buffers import is_write
from qtk.operators.op_table import op_name


def unknown_ops(model: nn.Module) -> tuple[str, ...]:
    """Names of the ops with a real or complex result and no row in the op table, in order of appearance."""
    names: dict[str, None] = {}
    for module in graphs(model).values():
        flow = Flow(module.graph)
        names |= {
            op_name(node): None for node in module.graph.nodes
            if node.op in ("call_function", "call_module") and node.target is not operator.getitem
            and flow.row(node) is None and not label(node, EXCLUDED) and not is_write(node) and _has_float(node)
        }
    return tuple(names)


def _has_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    elements = value if isinstance(value, (list, tuple)) else [value]
    return any(isinstance(e, torch.Tensor) and (e.is_floating_point() or e.is_complex()) for e in elements)
