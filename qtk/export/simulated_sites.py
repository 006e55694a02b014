"""The quantized values of a simulated model: for each site its encoding and, if it is constant, its value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from qtk.core.encoding import Encoding
from qtk.core.spec import QuantSpec
from qtk.errors import ExportError
from qtk.graph.evaluate import evaluate
from qtk.graph.graphs import with_nested
from qtk.graph.insert import quantizer_nodes
from qtk.graph.sites import SITE, label
from qtk.graph.written_buffers import is_input
from qtk.nn.eval_mode import evaluating
from qtk.quantizers.quantizer import Mode, Quantizer


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedSite:
    """A call of a quantizer in SIMULATE.

    Args:
        name: name of the site.
        node: the call in its graph.
        quantizer: the quantizer that is called.
        encoding: its encoding; ``None`` for dynamic quantization.
        constant: the float value, if it depends on parameters alone; ``None`` if it depends on the inputs.
    """

    name: str
    node: fx.Node
    quantizer: Quantizer
    encoding: Encoding | None
    constant: Tensor | None

    @property
    def spec(self) -> QuantSpec:
        return self.quantizer.spec


def simulated_sites(model: fx.GraphModule) -> list[SimulatedSite]:
    """The quantized values of ``model`` and its nested graphs, in order, with the current parameters.

    A value without readers is left out, as it is from the exported graph.

    Raises: ExportError naming a site without an encoding.
    """
    sites: dict[str, SimulatedSite] = {}
    with evaluating(model), torch.no_grad():
        for module in with_nested(model):
            sites |= {site.name: site for site in _simulated_in(module)}
    return list(sites.values())


def _simulated_in(module: fx.GraphModule) -> Iterator[SimulatedSite]:
    nodes = quantizer_nodes(module)
    for node, quantizer in nodes.items():
        if quantizer.mode is not Mode.SIMULATE or not node.users:
            continue
        name = label(node, SITE)
        assert name is not None, f"{node} has no site"
        if not quantizer.ready:
            raise ExportError(f"{name} has no encoding; run sim.compute_encodings(data) first")
        (source,) = node.args
        assert isinstance(source, fx.Node)
        constant = None if quantizer.spec.dynamic else _constant(source, nodes)
        yield SimulatedSite(name, node, quantizer, quantizer.encoding, constant)


def _constant(node: fx.Node, quantizers: Mapping[fx.Node, Quantizer]) -> Tensor | None:
    """The value of a node that depends on parameters alone, without another quantizer before it; else ``None``."""
    ancestors: set[fx.Node] = set()
    pending = [node]
    while pending:
        current = pending.pop()
        if is_input(current) or current in quantizers:
            return None
        if current not in ancestors:
            ancestors.add(current)
            pending.extend(current.all_input_nodes)
    value = evaluate(node, {})
    assert isinstance(value, Tensor)
    return value.detach()
