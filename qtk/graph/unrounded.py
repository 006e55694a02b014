"""Model inputs in front of their quantizers, for the ops that make no real numbers of them.

A comparison with a marker, ``x == -1``, and an index, ``x[:, 0].long()``, need the number that was passed: a marker is
no value of the quantizer's grid. Such ops read the input itself, through copies of the ops that move or pick elements
or compute each by itself, ``(10 * x[:, 0]).long()``, up to the next quantizer. What compares an input with values that
are computed of it, and rounded, stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, fx

from qtk.graph.sites import add_labels, is_float, label
from qtk.operators.lookup import is_elementwise, is_random, row_of
from qtk.operators.op_row import Role
from qtk.operators.op_table import DROPOUT

COPIED = "qtk_unrounded"
"""Label key of a copy: the name of the node it was made of."""


def read_unrounded(quantized: Iterable[fx.Node]) -> None:
    """Lets ops that make no real numbers of model inputs read them unrounded. Args: the calls of their quantizers."""
    unrounded = {call: call.all_input_nodes[0] for call in quantized}
    copied, rounded = set(unrounded), set(unrounded)

    def of(node: fx.Node) -> fx.Node:
        if node not in unrounded:
            sources = {read: of(read) for read in node.all_input_nodes if read in copied}
            with node.graph.inserting_after(node):
                copy = node.graph.node_copy(node, lambda read: sources.get(read, read))
            add_labels(copy, **{COPIED: node.name})
            unrounded[node] = copy
        return unrounded[node]

    for node in [node for call in list(unrounded)[:1] for node in call.graph.nodes]:
        reads = [read for read in node.all_input_nodes if read in rounded]
        value = node.meta.get("val")
        if not reads or isinstance(value, int | torch.SymInt):
            continue  # sizes are the same
        if copied.issuperset(reads):
            if isinstance(value, Tensor) and not is_float(node):
                for read in reads:
                    node.replace_input_with(read, of(read))
                continue
            if _moves(node) or (is_elementwise(node) and not is_random(node)):
                copied.add(node)
        rounded.add(node)


def remove_copies(graph: fx.Graph) -> None:
    """Undoes ``read_unrounded``, once the quantizers are removed."""
    nodes = {node.name: node for node in graph.nodes}
    for node in reversed(list(graph.nodes)):
        original = nodes.get(str(label(node, COPIED)))
        if original is not None:
            node.replace_all_uses_with(original)
            graph.erase_node(node)


def _moves(node: fx.Node) -> bool:
    row = row_of(node)
    return row is not None and row.role is Role.MOVEMENT and row is not DROPOUT and node.op == "call_function" and (
        not is_random(node))
