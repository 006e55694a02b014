"""Which quantizers a gradient of the outputs can reach: a parameter that none reaches is an error of many trainers."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

from qtk.graph.graphs import graphs
from qtk.graph.insert import quantizer_called
from qtk.quantizers.quantizer import Quantizer
from qtk.torch_private import pytree

BLOCKING = frozenset({torch.ops.aten.detach.default, torch.ops.aten.detach_.default})


def without_gradient(model: nn.Module) -> set[Quantizer]:
    """The quantizers of values that reach the outputs only through integers or ``detach``, or do not.

    >>> import qtk
    >>> class Net(nn.Module):
    ...     def forward(self, x):
    ...         return (2 * x).detach() + x.exp()
    >>> sim = qtk.QuantSim(Net(), torch.randn(4))
    >>> without = without_gradient(sim.model)
    >>> [name for name, quantizer in sim.quantizers.items() if quantizer in without]
    ['mul:out']
    """
    with_one: set[Quantizer] = set()
    called: set[Quantizer] = set()
    for graph in graphs(model).values():
        reached: set[fx.Node] = set()
        for node in reversed(graph.graph.nodes):
            quantizer = quantizer_called(node)
            is_reached = node.op == "output" or (node in reached and _passes(node))
            if is_reached:
                reached.update(node.all_input_nodes)
            if quantizer is not None:
                (with_one if is_reached else called).add(quantizer)
    return called - with_one


def _passes(node: fx.Node) -> bool:
    """Says whether a gradient passes an op, as far as it is known: all values that it makes are integers otherwise."""
    made = [value for value in pytree.tree_leaves(node.meta.get("val")) if isinstance(value, Tensor)]
    return node.target not in BLOCKING and (not made or any(value.is_floating_point() for value in made))
