"""Computes the values that depend on parameters and buffers alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor, fx, nn

from qtk.core.site import Site
from qtk.graph.evaluate import evaluate
from qtk.graph.flow import Flow
from qtk.graph.graphs import graphs
from qtk.graph.insert import quantizer_nodes
from qtk.graph.sites import edge_site, ports, value_site


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
