"""Writes linear layers with int32 biases as products of two matrices, which ONNX Runtime computes in one operator.

A linear layer on more than two axes is exported as MatMul and Add, of which ONNX Runtime (seen in 1.31) computes the
product in integers, its scaling and the addition in float, each over the whole tensor. On two axes it is a Gemm, which
becomes one QGemm: the codes of the bias are added to the integer sums.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from qtk.core.dtypes import INT32
from qtk.graph.insert import quantizer_called
from qtk.operators.lookup import row_of

_ATEN = torch.ops.aten


def flatten_linears(original: fx.Graph, copied: fx.Graph) -> None:
    """Lets each linear layer of ``copied``, whose bias is int32 in ``original``, read and write a matrix.

    Changes ``copied``, a copy of ``original`` node for node.
    """
    for node, twin in zip(original.nodes, list(copied.nodes), strict=True):
        if node.target is _ATEN.linear.default and len(node.args) == 3 and _rank(node.args[0]) > 2:
            quantizer = quantizer_called(node.args[2]) if isinstance(node.args[2], fx.Node) else None
            if quantizer is not None and quantizer.spec.dtype == INT32:
                _flatten(twin)


def _rank(node: object) -> int:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value.ndim if isinstance(value, Tensor) else 0


def _flatten(node: fx.Node) -> None:
    value, result = node.args[0], node.meta["val"]
    assert isinstance(value, fx.Node)
    graph = node.graph
    with graph.inserting_before(node):
        sizes = [
            graph.call_function(_ATEN.sym_size.int, (value, axis)) if isinstance(length, torch.SymInt) else length
            for axis, length in enumerate(result.shape)
        ]
        matrix = graph.call_function(_ATEN.reshape.default, (value, [-1, value.meta["val"].shape[-1]]))
    if sum(isinstance(size, fx.Node) for size in sizes) == 1:  # it follows from the others
        sizes = [-1 if isinstance(size, fx.Node) else size for size in sizes]
    last = _activated(node)
    with graph.inserting_after(last):
        whole = graph.call_function(_ATEN.reshape.default, (last, sizes))
    last.replace_all_uses_with(whole, delete_user_cb=lambda user: user is not whole)
    node.replace_input_with(value, matrix)


def _activated(node: fx.Node) -> fx.Node:
    """The activation function that alone reads the value of ``node``, else ``node``: QGemm takes up a rectifier."""
    reader = next(iter(node.users))
    row = row_of(reader) if len(node.users) == 1 else None
    return reader if row is not None and row.activation and reader.args[0] is node else node
