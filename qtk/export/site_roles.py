"""What quantized parameters are to the ops that read them, and which sites are of caches."""

from __future__ import annotations

from torch import fx

from qtk.core.dtypes import INT32
from qtk.export.quantized_file import TensorRole
from qtk.graph.flow import Flow
from qtk.graph.graphs import graphs
from qtk.graph.insert import quantizer_nodes
from qtk.graph.simulation import Simulation
from qtk.graph.sites import SITE, label


def parameter_roles(simulation: Simulation) -> dict[str, TensorRole]:
    """Site → role, of the sites of values that are made from parameters alone, and of keys and values; in graph order.

    >>> import qtk, torch
    >>> sim = qtk.QuantSim(torch.nn.Linear(8, 4), torch.randn(2, 8), config="onnxruntime")
    >>> parameter_roles(sim.simulation)
    {'weight': 'weights', 'bias': 'biases'}
    """
    static = {site.name for site, decided in simulation.plan.items() if decided.static}
    roles: dict[str, TensorRole] = {
        site.name: "caches" for site, decided in simulation.plan.items() if decided.is_cache}
    for graph in graphs(simulation.model).values():
        flow = Flow(graph.graph)
        for node, quantizer in quantizer_nodes(graph).items():
            site = label(node, SITE)
            if site in static:
                roles[site] = "biases" if quantizer.spec.dtype == INT32 else _role(node, flow)
    return {site.name: roles[site.name] for site in simulation.plan if site.name in roles}


def _role(node: fx.Node, flow: Flow) -> TensorRole:
    read = list(flow.readers(node))
    if any(port in flow.weight_ports(port.user) for port in read):
        return "weights"
    return "biases" if any(port in flow.bias_ports(port.user) for port in read) else "constants"
