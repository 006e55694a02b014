"""What quantization reaches in a model: how many parameters quantizers round, and which ops the op table knows."""

from __future__ import annotations

import operator

import torch
from torch import fx, nn

from qtk.graph.flow import Flow
from qtk.graph.graphs import graphs
from qtk.graph.insert import QUANTIZERS, quantizer_nodes
from qtk.graph.sites import EXCLUDED, label
from qtk.graph.written_buffers import is_state, is_write
from qtk.operators.lookup import op_name
from qtk.operators.targets import attribute


def coverage(model: nn.Module) -> float | None:
    """The share of all parameter elements that are quantized, or from which a quantized constant is computed.

    ``None`` for a model without quantizers; 1 for one without parameters.
    """
    if not any(quantizer_nodes(graph) for graph in graphs(model).values()):
        return None
    quantized = quantized_parameters(model)
    sizes = {p: p.numel() for name, p in model.named_parameters() if QUANTIZERS not in name.split(".")}
    total = sum(sizes.values())
    return sum(size for parameter, size in sizes.items() if parameter in quantized) / total if total else 1.0


def quantized_parameters(model: nn.Module) -> set[nn.Parameter]:
    """The parameters that are quantized, or from which a quantized constant is computed."""
    return {parameter for graph in graphs(model).values() for parameter in _quantized(graph)}


def _quantized(graph: fx.GraphModule) -> set[nn.Parameter]:
    """The parameters that quantized static values are computed from."""
    flow = Flow(graph.graph)
    pending = [node for node in quantizer_nodes(graph) if flow.is_static(node)]
    seen: set[fx.Node] = set()
    found: set[nn.Parameter] = set()
    while pending:
        node = pending.pop()
        if node.op == "get_attr" and isinstance(value := attribute(graph, str(node.target)), nn.Parameter):
            found.add(value)
        pending += [read for read in node.all_input_nodes if read not in seen]
        seen.update(node.all_input_nodes)
    return found


def unknown_ops(model: nn.Module) -> tuple[str, ...]:
    """Names of the ops with a real or complex result and no row in the op table, in order of appearance."""
    names: dict[str, None] = {}
    for module in graphs(model).values():
        flow = Flow(module.graph)
        names |= {
            op_name(node): None for node in module.graph.nodes
            if node.op in ("call_function", "call_module") and node.target is not operator.getitem
            and flow.row(node) is None and not label(node, EXCLUDED) and not is_write(node) and not is_state(node)
            and _has_float(node)
        }
    return tuple(names)


def _has_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    elements = value if isinstance(value, (list, tuple)) else [value]
    return any(isinstance(e, torch.Tensor) and (e.is_floating_point() or e.is_complex()) for e in elements)
