"""How many of a model's parameters its quantizers round."""

from __future__ import annotations

from torch import fx, nn

from qtk.graph.flow import Flow
from qtk.graph.graphs import graphs
from qtk.graph.insert import QUANTIZERS, quantizer_nodes
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
