"""Lets a graph read what forward writes into a parameter in place, and write nothing.

Forward writes a parameter where it bounds or normalizes it, as ``torch.nn.Embedding(max_norm=…)`` does with the rows
that it looks up. A second write of the same changes nothing more, so a graph may compute the value anew in each call;
whether it may is seen in a second call of the module. The weight is then computed from a parameter, and quantized as
such weights are.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx, nn
from torch.fx.node import Argument

from qtk.graph.written_buffers import is_write
from qtk.operators.targets import attribute
from qtk.torch_private import OpOverload

ATEN = torch.ops.aten

DETACH, RESHAPE, RENORM = ATEN.detach.default, ATEN.reshape.default, ATEN.embedding_renorm.default

LOOKUPS = (ATEN.embedding.default, ATEN.embedding_bag.padding_idx)

TINY = 1e-7
"""What torch adds to a norm by which it divides."""


def drop_parameter_writes(graph: fx.Graph, root: nn.Module) -> None:
    """Replaces writes into parameters of ``root`` by the values that are written. Changes ``graph``."""
    for write in [node for node in graph.nodes if is_write(node)]:
        held, value = write.args
        assert isinstance(held, fx.Node)
        assert isinstance(value, fx.Node)
        if isinstance(attribute(root, str(held.target)), nn.Parameter):
            write.replace_all_uses_with(value)
            graph.erase_node(write)
            if not _open_renorms(graph, held):
                _keep_gradient(graph, value)


def _open_renorms(graph: fx.Graph, table: fx.Node) -> bool:
    """Renormalizes ``table`` as a whole, if only lookups of renormalized rows read it so. Says whether it does."""
    renorms: list[fx.Node] = []
    for node in graph.find_nodes(op="call_function", target=RENORM):
        if _origin(node.args[0], DETACH) in (table, *renorms):
            renorms.append(node)
    readers = [(node, reader) for node in renorms for reader in _readers(node) if reader not in renorms]
    if len({node.args[2:] for node in renorms}) != 1 or any(
        reader.target not in LOOKUPS or _origin(reader.args[1], RESHAPE) is not _origin(node.args[1], RESHAPE)
        for node, reader in readers
    ):
        return False
    renormalized = _renormalized(graph, renorms[0], table)
    for _, reader in readers:
        reader.args = (renormalized, *reader.args[1:])
    graph.eliminate_dead_code()
    return True


def _origin(value: Argument, op: OpOverload) -> Argument:
    """The value of which ``value`` is made by calls of ``op`` alone."""
    while isinstance(value, fx.Node) and value.target is op:
        value = value.args[0]
    return value


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        if user.target is DETACH:
            yield from _readers(user)
        else:
            yield user


def _renormalized(graph: fx.Graph, renorm: fx.Node, table: fx.Node) -> fx.Node:
    """``table`` [rows, width] with each row scaled as ``renorm`` scales rows whose norm is too large."""
    max_norm, norm_type = renorm.args[2:]

    def add(target: OpOverload, *args: Argument) -> fx.Node:
        added = graph.call_function(target, args)
        added.meta = {**renorm.meta, "val": target(*fx.node.map_arg(args, lambda read: read.meta["val"]))}
        return added

    with graph.inserting_before(renorm):
        norm = add(ATEN.linalg_vector_norm.default, table, norm_type, [1], True)
        factor = add(ATEN.mul.Tensor, add(ATEN.reciprocal.default, add(ATEN.add.Tensor, norm, TINY)), max_norm)
        factor = add(ATEN.masked_fill.Scalar, factor, add(ATEN.le.Scalar, norm, max_norm), 1.0)
        return add(ATEN.mul.Tensor, table, add(DETACH, factor))  # the gradient is of the row that is looked up


def _keep_gradient(graph: fx.Graph, value: fx.Node) -> None:
    """Takes out what detaches a written ``value`` from its parameter, which trains in the original."""
    behind, pending = {value}, [value]
    while pending:
        new = {*pending.pop().all_input_nodes} - behind
        behind |= new
        pending += new
    for node in [node for node in (*behind, *value.users) if node.target is DETACH]:
        node.replace_all_uses_with(node.all_input_nodes[0])
        graph.erase_node(node)
