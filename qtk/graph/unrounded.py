"""Model inputs in front of their quantizers, for the ops that make no real numbers of them.

A comparison with a marker, ``x == -1``, and an index, ``x[:, 0].long()``, need the number that was passed: a marker is
no value of the quantizer's grid. Such ops read the input itself, through copies of the ops that move its elements where
these are read as real numbers too.
"""

from __future__ import annotations

from torch import Tensor, fx

from qtk.graph.sites import add_labels, is_float, label
from qtk.operators.lookup import row_of
from qtk.operators.op_row import Role

COPIED = "qtk_unrounded"
"""Label key of a copy: the name of the node it was made of."""


def reads_unrounded(user: fx.Node) -> bool:
    """Says whether an op of a model input makes no real number of it, or moves it for such ops alone."""
    if not is_float(user):
        return user.op != "output" and isinstance(user.meta.get("val"), Tensor)
    return _moves(user) and bool(user.users) and all(map(reads_unrounded, user.users))


def read_moved_unrounded(quantized: fx.Node) -> None:
    """Lets ops that make no real numbers of a moved model input read it unrounded. Args: its quantizer's call."""
    unrounded = {quantized: quantized.all_input_nodes[0]}

    def of(node: fx.Node) -> fx.Node:
        if node not in unrounded:
            read = next(each for each in node.all_input_nodes if each in moved)
            source = of(read)
            with node.graph.inserting_after(node):
                copy = node.graph.node_copy(node, lambda each: source if each is read else each)
            add_labels(copy, **{COPIED: node.name})
            unrounded[node] = copy
        return unrounded[node]

    moved = {quantized: None}
    queue = [quantized]
    for value in queue:
        for user in list(value.users):
            if reads_unrounded(user):
                user.replace_input_with(value, of(value))
            elif _moves(user) and is_float(user):
                moved[user] = None
                queue.append(user)


def remove_copies(graph: fx.Graph) -> None:
    """Undoes ``read_moved_unrounded``, once the quantizers are removed."""
    nodes = {node.name: node for node in graph.nodes}
    for node in reversed(list(graph.nodes)):
        original = label(node, COPIED)
        if original is not None:
            node.replace_all_uses_with(nodes[original])
            graph.erase_node(node)


def _moves(node: fx.Node) -> bool:
    row = row_of(node)
    return row is not None and row.role is Role.MOVEMENT
