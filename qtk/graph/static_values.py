"""Values made from parameters alone, computed without any input."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn

from qtk.core.site import Site
from qtk.graph.flow import Flow
from qtk.graph.graphs import graphs
from qtk.graph.insert import quantizer_nodes
from qtk.graph.sites import edge_site, ports, value_site


def static_values(model: nn.Module, sites: Collection[Site]) -> Iterator[tuple[Site, Tensor]]:
    """The float value at each static site of ``sites``, in graph order, one at a time.

    Quantizers on the way are passed by: a weight is observed as it is, not as another site rounds it.
    """
    for module in graphs(model).values():
        yield from _values(module, sites)


def _values(model: fx.GraphModule, sites: Collection[Site]) -> Iterator[tuple[Site, Tensor]]:
    flow = Flow(model.graph)
    bypassed = set(quantizer_nodes(model))
    known: dict[fx.Node, object] = {}

    def value(node: fx.Node) -> Any:
        if node not in known:
            args: Any = fx.node.map_arg(node.args, value)
            kwargs: Any = fx.node.map_arg(node.kwargs, value)
            known[node] = _call(model, node, args, kwargs, bypass=node in bypassed)
        return known[node]

    for node in model.graph.nodes:
        if node in bypassed:
            continue
        found = [(edge_site(port), port.value) for port in ports(node)] + [(value_site(node), node)]
        for site, source in found:
            if site in sites and flow.is_static(source):
                with torch.no_grad():
                    tensor = value(source)
                assert isinstance(tensor, Tensor)
                yield site, tensor.detach()


def _call(
    model: fx.GraphModule, node: fx.Node, args: tuple[object, ...], kwargs: dict[str, object], *, bypass: bool
) -> object:
    match node.op:
        case "get_attr":
            return _attribute(model, str(node.target))
        case "call_function":
            assert callable(node.target)
            return node.target(*args, **kwargs)
        case "call_module":
            return args[0] if bypass else model.get_submodule(str(node.target))(*args, **kwargs)
    raise AssertionError(f"{node.op} cannot be static")


def _attribute(model: fx.GraphModule, name: str) -> object:
    owner, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(owner), leaf)
