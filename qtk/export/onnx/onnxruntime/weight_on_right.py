"""Writes products whose stored weight is not their right factor so that it is; values do not change.

ONNX Runtime multiplies uint8 by int8 weights on the right, has no integer kernel for int8 × uint8 and none for Einsum.

1. W x becomes (xᵀ Wᵀ)ᵀ.
2. Einsum of x and a matrix, summed over the last axis of x and returned in its place, becomes MatMul.
"""

from __future__ import annotations

import re

import onnx_ir as ir

from qtk.export.onnx.names import ValueNames
from qtk.export.onnx.node_writer import codes_of
from qtk.export.onnx.onnxruntime.linear_nodes import inserted, replace_by


def move_weight_to_rhs(graph: ir.Graph, names: ValueNames) -> None:
    """Rewrites every such product of ``graph`` and its subgraphs. In place."""
    for node in list(graph.all_nodes()):
        if len(node.inputs) != 2:
            continue
        left, right = node.inputs
        if node.op_type == "MatMul" and _is_stored_matrix(left) and not _is_stored_matrix(right) and _rank(right) > 1:
            _transpose_product(node, names)
        elif node.op_type == "Einsum" and _is_stored_matrix(right) and (order := _order(node)) is not None:
            _to_matmul(node, order, names)


def _transpose_product(node: ir.Node, names: ValueNames) -> None:
    """Case 1."""
    weight, x = node.inputs
    rank = _rank(x)
    swapped = [*range(rank - 2), rank - 1, rank - 2]
    factors = [_transposed(node, x, swapped, names), _transposed(node, weight, [1, 0], names)]
    product = inserted(node, "MatMul", factors, _permuted(node.outputs[0], swapped), names)
    replace_by(node, _transposed(node, product, swapped, names), names)


def _to_matmul(node: ir.Node, order: list[int], names: ValueNames) -> None:
    """Case 2."""
    x, weight = node.inputs
    if order != [0, 1]:
        weight = _transposed(node, weight, order, names)
    replace_by(node, inserted(node, "MatMul", [x, weight], node.outputs[0].shape, names), names)


def _order(einsum: ir.Node) -> list[int] | None:
    """The order of the axes of the matrix in which Einsum is MatMul: [0, 1], or [1, 0]; ``None`` if it is not MatMul.

    ``bij,jk->bik``: [0, 1]; ``bij,kj->bik``: [1, 0]; ``oi,bij->boj``: none.
    """
    equation = einsum.attributes["equation"].as_string().replace(" ", "")
    match = re.fullmatch(r"((?:\.\.\.)?[A-Za-z]*)([A-Za-z]),([A-Za-z])([A-Za-z])->\1([A-Za-z])", equation)
    if match is None:
        return None
    rows, summed, first, second, made = match.groups()
    letters = [*rows.replace(".", ""), summed, made]
    if len(set(letters)) < len(letters) or {first, second} != {summed, made}:
        return None
    return [0, 1] if first == summed else [1, 0]


def _is_stored_matrix(value: ir.Value | None) -> bool:
    node = None if value is None else value.producer()
    return node is not None and node.op_type == "DequantizeLinear" and codes_of(node).is_initializer() and (
        len(codes_of(node).shape or ()) == 2)


def _rank(value: ir.Value | None) -> int:
    return 0 if value is None or value.shape is None else len(value.shape)


def _permuted(value: ir.Value | None, order: list[int]) -> ir.Shape | None:
    return None if value is None or value.shape is None else ir.Shape([value.shape[axis] for axis in order])


def _transposed(before: ir.Node, value: ir.Value | None, order: list[int], names: ValueNames) -> ir.Value:
    return inserted(before, "Transpose", [value], _permuted(value, order), names, [ir.AttrInt64s("perm", order)])
