"""Evaluation of a captured graph, node by node, and of the values that depend on its parameters and buffers alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn

from qtk.core.site import Site
from qtk.graph.flow import Flow
from qtk.graph.graphs import graphs
from qtk.graph.insert import quantizer_called, quantizer_nodes
from qtk.graph.sites import edge_site, ports, value_site
from qtk.graph.written_buffers import is_write
from qtk.operators.targets import attribute
from qtk.public import runs_model


@runs_model
def evaluate_node(node: fx.Node, read: Callable[[fx.Node], Any], *, bypass_quantizer: bool = False) -> Any:
    """Evaluates one ``get_attr``, ``call_function`` or ``call_module`` node; buffers stay as they are.

    Args:
        node: a node of a graph that a module owns.
        read: returns the value of an argument node.
        bypass_quantizer: return the input of a quantizer instead of calling it.
    """
    owner = node.graph.owning_module
    assert owner is not None
    if node.op == "get_attr":
        return attribute(owner, str(node.target))
    if is_write(node):
        _, value = node.args
        assert isinstance(value, fx.Node)
        return read(value)
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), read)
    if node.op == "call_module":
        if bypass_quantizer and quantizer_called(node) is not None:
            return args[0]
        return owner.get_submodule(str(node.target))(*args, **kwargs)
    assert node.op == "call_function", f"{node.op} {node} is an input or the output of its graph"
    assert callable(node.target)
    return node.target(*args, **kwargs)


def evaluate(node: fx.Node, values: dict[fx.Node, Any], *, bypass_quantizers: bool = False) -> Any:
    """Evaluates ``node`` and every node it depends on whose value is not known yet.

    Args:
        node: a node.
        values: the known values, including the values of the inputs. Changed: every computed value is added.
        bypass_quantizers: return the inputs of quantizers instead of calling them.
    """
    pending = [node]
    while pending:
        current = pending[-1]
        missing = [] if current in values else [read for read in current.all_input_nodes if read not in values]
        if not missing:
            pending.pop()
            if current not in values:
                values[current] = evaluate_node(current, values.__getitem__, bypass_quantizer=bypass_quantizers)
        pending.extend(missing)
    return values[node]


def static_values(model: nn.Module, sites: Collection[Site]) -> Iterator[tuple[Site, Tensor]]:
    """Yields each static site of ``sites`` with its float value, in graph order.

    Quantizers are bypassed, so that no value contains the rounding of another site.
    """
    for module in graphs(model).values():
        yield from _values(module, sites)


def _values(model: fx.GraphModule, sites: Collection[Site]) -> Iterator[tuple[Site, Tensor]]:
    flow = Flow(model.graph)
    quantizers = quantizer_nodes(model)
    known: dict[fx.Node, object] = {}
    for node in model.graph.nodes:
        if node in quantizers:
            continue
        sources = [(edge_site(port), port.value) for port in ports(node)] + [(value_site(node), node)]
        for site, source in sources:
            if site in sites and flow.is_static(source):
                with torch.no_grad():
                    tensor = evaluate(source, known, bypass_quantizers=True)
                assert isinstance(tensor, Tensor)
                yield site, tensor.detach()
