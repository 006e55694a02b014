"""The encodings of a simulation by the names of the tensors in its float ONNX files."""

from __future__ import annotations

from torch import Tensor, nn

from qtk.aimet.fields import NamedEncoding
from qtk.aimet.tensor_names import tensor_names
from qtk.core.granularity import Shape
from qtk.graph.graphs import graphs
from qtk.graph.insert import quantizer_nodes
from qtk.graph.simulation import Simulation
from qtk.graph.sites import SITE, label


def named_encodings(simulation: Simulation) -> list[NamedEncoding]:
    """Every tensor with an encoding, in graph order; dynamically quantized ones have none.

    >>> import qtk, torch
    >>> sim = qtk.QuantSim(nn.Linear(8, 4), torch.randn(2, 8))
    >>> sim.compute_encodings([torch.randn(2, 8)], progress=False)
    >>> [(tensor.name, tensor.is_parameter) for tensor in named_encodings(sim.simulation)]
    [('weight', True), ('input', False), ('output', False)]
    """
    encodings = {site.name: each.encoding for site, each in simulation.quantizers.items()}
    parameters = {site.name for site, decided in simulation.plan.items() if decided.static}
    shapes = site_shapes(simulation.model)
    return [
        NamedEncoding(name, encoding, site in parameters, shapes.get(site))
        for name, site in tensor_names(simulation.model).items() if (encoding := encodings.get(site)) is not None
    ]


def site_shapes(model: nn.Module) -> dict[str, Shape]:
    """Site → shape of its value, of the values whose shape is fixed."""
    shapes = {}
    for graph in graphs(model).values():
        for node in quantizer_nodes(graph):
            (source,) = node.all_input_nodes
            value, site = source.meta.get("val"), label(node, SITE)
            if site is not None and isinstance(value, Tensor) and all(isinstance(each, int) for each in value.shape):
                shapes[site] = tuple(value.shape)
    return shapes
