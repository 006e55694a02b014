"""Grouped matrix products in ONNX, which has no operator for them: the rows of each group times its matrix, joined."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx_ir as ir
from onnxscript import opset18 as op
from torch.export import ExportedProgram

from qtk.errors import ExportError
from qtk.operators.lookup import row_of
from qtk.operators.op_table import ROWS

Translation = Callable[..., object]


def grouped_matmul_translations(program: ExportedProgram) -> Mapping[Callable[..., object], Translation]:
    """Operator → its translation, for every operator of a program that is a grouped product.

    Raises: ExportError for a form of the product other than ``[rows, in]`` by ``[groups, in, out]``.
    """
    calls = [node for node in program.graph.nodes if row_of(node) is ROWS["_grouped_mm"]]
    for node in calls:
        x, stack, *others = node.args
        given = [*others[1:], *node.kwargs.values()]
        if (x.meta["val"].ndim, stack.meta["val"].ndim) != (2, 3) or any(option is not None for option in given):
            raise ExportError(
                f"{node.name} is a grouped product that ONNX has no form of: only rows [rows, in] in groups times a "
                "stack [groups, in, out], without bias; export formats=('encodings',)"
            )
    return {node.target: _grouped_matmul for node in calls}


def _grouped_matmul(x: ir.Value, stack: ir.Value, ends: ir.Value) -> object:
    """``x[ends[g - 1] : ends[g]] @ stack[g]`` for every group g, one below the other; 0 in the rows that remain.

    Shape: x [rows, in], stack [groups, in, out], ends [groups]; the result [rows, out].
    """
    assert stack.shape is not None
    groups, _, width = stack.shape
    assert isinstance(groups, int)
    ends = op.Cast(ends, to=ir.DataType.INT64)
    start, products = _ints(0), []
    for group in range(groups):
        end = op.Slice(ends, _ints(group), _ints(group + 1))
        products.append(op.MatMul(op.Slice(x, start, end, _ints(0)), op.Gather(stack, _int(group))))
        start = end
    rows = op.Slice(op.Shape(x), _ints(0), _ints(1))
    rest = op.ConstantOfShape(op.Concat(op.Sub(rows, start), _ints(width), axis=0))
    return op.Concat(*products, op.CastLike(rest, x), axis=0)


def _ints(number: int) -> object:
    return op.Constant(value_ints=[number])


def _int(number: int) -> object:
    return op.Constant(value_int=number)
