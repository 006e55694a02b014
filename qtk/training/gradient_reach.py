"""Which quantizers a gradient of the outputs can reach: a parameter that none reaches is an error of many trainers."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from qtk.graph.graphs import graphs
from qtk.operators.targets import called_module
from qtk.quantizers.quantizer import Quantizer

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
    with_one: set[nn.Module] = set()
    called: set[Quantizer] = set()
    for graph in graphs(model).values():
        reached: set[fx.Node] = set()
        for node in reversed(graph.graph.nodes):
            module = called_module(node)
            if isinstance(module, Quantizer):
                called.add(module)
            if node.op == "output" or (node in reached and _passes(node)):
                reached.update(node.all_input_nodes)
                with_one.update([module] if isinstance(module, Quantizer) else [])
    return called - with_one


def _passes(node: fx.Node) -> bool:
    """Says whether a gradient passes an op, as far as it is known: all values that it makes are integers otherwise."""
    made = [value for value in tree_leaves(node.meta.get("val")) if isinstance(value, Tensor)]
    return node.target not in BLOCKING and (not made or any(value.is_floating_point() for value in made))
