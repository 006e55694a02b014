"""The sites whose encodings no longer fit after values or parameters were scaled."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import fx, nn

from qtk.core.site import Site
from qtk.graph.graphs import graphs
from qtk.graph.sites import edge_site, ports, value_site
from qtk.graph.written_buffers import is_input
from qtk.operators.targets import attribute
from qtk.transforms.named_tensors import NamedTensors


def sites_of_values(makers: Iterable[fx.Node]) -> set[Site]:
    """The sites of the values that ops make, and of the edges on which they are read."""
    sites: set[Site] = set()
    for node in makers:
        sites.add(value_site(node))
        sites |= {edge_site(port) for user in node.users for port in ports(user) if port.value is node}
    return sites


def sites_of_parameters(model: nn.Module, names: Collection[str | None]) -> set[Site]:
    """The sites of the values that are computed from some parameters alone, and of the edges on which they are read.

    Args:
        model: a prepared model without quantizers.
        names: of the parameters, as ``NamedTensors`` has them.
    """
    members = NamedTensors(model)
    sites: set[Site] = set()
    for graph in graphs(model).values():
        static, derived = set[fx.Node](), set[fx.Node]()
        for node in graph.graph.nodes:
            if not is_input(node) and static.issuperset(node.all_input_nodes):
                static.add(node)
            if node.op == "get_attr":
                is_derived = members.name(attribute(graph, str(node.target))) in names
            else:
                is_derived = node in static and not derived.isdisjoint(node.all_input_nodes)
            if is_derived:
                derived.add(node)
        sites |= sites_of_values(derived)
    return sites
