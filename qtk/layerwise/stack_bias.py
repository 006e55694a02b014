"""The bias of a stack of matrices, a row for each: added to the product by the matrix that each row has met."""

from __future__ import annotations

import math

from torch import Tensor, fx

from qtk.graph.flow import Flow, ancestors
from qtk.graph.insert import quantizer_called
from qtk.moments.stack_use import NotALayer, StackUse, moves_between
from qtk.operators.targets import aten_name, attribute


def stack_bias(graph: fx.GraphModule, flow: Flow, use: StackUse) -> tuple[Tensor | None, tuple[fx.Node, ...]]:
    """The parameter [matrices, outputs] that is added to the result of ``use`` alone, and the ops that move it.

    ``None`` where nothing is added, or another value than one row of a parameter for the matrix of each row.
    """
    product = use.op
    while len(product.users) == 1 and aten_name((added := next(iter(product.users))).target) != "add":
        if quantizer_called(added) is None and flow.carried(added) is not product:
            return None, ()
        product = added
    if len(product.users) != 1 or len(added.all_input_nodes) != 2 or added.kwargs:
        return None, ()
    (value,) = (read for read in added.all_input_nodes if read is not product)
    root = flow.root(value)
    source = root.all_input_nodes[0] if quantizer_called(root) is not None else root
    try:
        moves = moves_between(flow, value, root)
    except NotALayer:
        return None, ()
    if source.op != "get_attr":
        return None, ()
    weight, bias = use.root.meta["val"], attribute(graph, str(source.target))
    matrices, outputs = use.axes.count(weight.shape), math.prod(weight.shape[axis] for axis in use.axes.outputs)
    indices = {read for move in moves for read in move.all_input_nodes} - {root, *moves}
    shape = tuple(value.meta["val"].shape)
    is_each = indices <= ancestors(use.reads) | set(use.reads) if indices else shape[-3:] == (matrices, 1, outputs)
    return (bias, moves) if is_each and tuple(bias.shape) == (matrices, outputs) else (None, ())
