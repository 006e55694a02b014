"""Products in float, in an exported program whose delegate computes a product in integers or not at all.

XNNPACK's partitioner (ExecuTorch 1.5.1, ``GEMMConfig.get_deps``) looks for the dequantize ops of a product's operands
and for the quantize op of its result. It marks the ops that it finds as parts of an integer product even if one is
missing and it leaves the product to another kernel. The delegate skips marked ops: their results are never written,
and keep the number of rows that memory was planned for. A product whose second operand does not come directly from a
dequantize op is a product in float to the partitioner, which then marks nothing. Without the copies each case of
``tests/runtimes/test_executorch_program.py`` that has a product in float gives wrong rows or an error.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from qtk.config.runtime import NeighbourRule
from qtk.export.repeated_ops import is_dequantize
from qtk.operators.lookup import row_of
from qtk.operators.op_row import Product

_QUANTIZE = "quantized_decomposed.quantize"


def copy_float_operands(graph: fx.Graph, rule: NeighbourRule) -> None:
    """Copies the dequantized second operand of each product that ``rule`` leaves in float.

    Changes ``graph``; the numbers stay the same.

    Args:
        graph: the graph of an exported program.
        rule: the kinds of ops that are computed in integers, and the activations that are fused with them.
    """
    for node in list(graph.nodes):
        row = row_of(node)
        if row is None or row.product is None or row.data_arg is None:
            continue
        data, operand = node.args[row.data_arg], node.args[max(row.weights)]
        if not isinstance(operand, fx.Node) or not is_dequantize(operand):
            continue
        if row.product is Product.IN_OUT and not _is_matrix(operand):  # the partitioner marks nothing around batches
            continue
        reads_codes = isinstance(data, fx.Node) and is_dequantize(data) and _is_stored(operand)
        if set(row.names) & set(rule.op) and reads_codes and _ends_quantized(node, rule):
            continue
        with graph.inserting_before(node):
            copied = graph.call_function(torch.ops.aten.clone.default, (operand,))
        copied.meta["val"] = operand.meta["val"].clone()
        node.replace_input_with(operand, copied)


def _is_matrix(node: fx.Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, Tensor) and value.ndim == 2


def _is_stored(dequantize: fx.Node) -> bool:
    """Says whether an op dequantizes codes that the program holds."""
    codes = dequantize.args[0]
    return isinstance(codes, fx.Node) and codes.op == "placeholder"


def _ends_quantized(node: fx.Node, rule: NeighbourRule) -> bool:
    """Says whether one quantize op alone reads the result, or the result of a single activation that is fused."""
    readers = list(node.users)
    if len(readers) == 1 and (row := row_of(readers[0])) is not None and set(row.names) & set(rule.fused):
        readers = list(readers[0].users)
    return len(readers) == 1 and str(readers[0].target).startswith(_QUANTIZE)
