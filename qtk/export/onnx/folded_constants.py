"""Values that a graph computes from its parameters alone, stored instead of computed, as the simulation has them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor, fx

from qtk.core.site import Site
from qtk.export.onnx.site_markers import is_marker
from qtk.graph.evaluate import evaluate
from qtk.graph.sites import value_site
from qtk.graph.written_buffers import is_input
from qtk.operators.lookup import is_random

Rounding = Callable[[Tensor], Tensor]


def with_constants(
    model: fx.GraphModule, sites: Collection[Site], quantizers: Mapping[str, Rounding]
) -> fx.GraphModule | None:
    """A graph module in which the ops of ``sites`` that read parameters alone are replaced by their values.

    >>> from torch import nn
    >>> class Flow(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.weight = nn.Parameter(torch.eye(3))
    ...     def forward(self, x):
    ...         return x @ torch.inverse(self.weight)
    >>> import qtk
    >>> model = qtk.prepare_model(Flow(), torch.randn(2, 3))
    >>> folded = with_constants(model, {Site("", "inverse", "out")}, {})
    >>> [str(node.target) for node in folded.graph.nodes]
    ['x', 'qtk_constant_0', 'aten.matmul.default', 'output']

    Args:
        model: the model, with markers of quantized values; its graph changes.
        sites: the values that the ops make.
        quantizers: the name of a marked site → what rounds its value.

    Returns: the graph module, which holds what its graph reads alone; ``None`` if no op of ``sites`` is such.
    """
    constants = _constants(model.graph)
    chosen = {node for node in constants if node.op == "call_function" and value_site(node) in sites}
    stored = [node for node in model.graph.nodes if node in chosen or (node in constants and _source(node) in chosen)]
    read = set(stored)
    for node in reversed(model.graph.nodes):
        read.update(node.all_input_nodes if node in read else ())
    values: dict[fx.Node, object] = {}
    with torch.no_grad():
        for node in model.graph.nodes:
            if node in read and is_marker(node):
                value, name = node.args
                values[node] = quantizers[str(name)](evaluate(value, values))
        stored = [node for node in stored if isinstance(evaluate(node, values), Tensor)]
    if not stored:
        return None
    for index, node in enumerate(stored):
        value = values[node]
        assert isinstance(value, Tensor)
        model.register_buffer(f"qtk_constant_{index}", value.detach().clone())
        with model.graph.inserting_before(node):
            constant = model.graph.get_attr(f"qtk_constant_{index}")
        constant.meta = dict(node.meta)
        node.replace_all_uses_with(constant)
    for node in reversed(list(model.graph.nodes)):
        if node in constants and not node.users and not is_marker(node):
            model.graph.erase_node(node)
    return fx.GraphModule(model, model.graph)


def _constants(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that read parameters and numbers alone, and no random numbers."""
    constants: set[fx.Node] = set()
    for node in graph.nodes:
        is_op = node.op == "call_function" and not is_random(node)
        if (node.op == "get_attr" or is_op) and not is_input(node) and constants.issuperset(node.all_input_nodes):
            constants.add(node)
    return constants


def _source(node: fx.Node) -> object:
    """The op of whose results ``node`` takes one."""
    return node.args[0] if node.target is operator.getitem else None
