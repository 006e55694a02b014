"""Writes GELU and SiLU in the form that ONNX Runtime computes in one operator; values do not change.

1. x · (½ · (1 + erf(x / √2))), as torch's exporter writes GELU, becomes (x · (1 + erf(x / √2))) · ½, which ONNX Runtime
   (seen in 1.31) fuses into Gelu. Halving is exact, so the order does not matter.
2. GELU and SiLU (x · sigmoid(x)) read their input twice. ONNX Runtime gives every reader a DequantizeLinear of its own
   before it looks for these functions, and then finds two inputs; so a dequantized value goes through Max of one input,
   which returns it. Max costs less than the second DequantizeLinear.
"""

from __future__ import annotations

import onnx_ir as ir

from qtk.export.onnx.names import ValueNames
from qtk.export.onnx.onnxruntime.qdq_barrier import insert_barrier

FORMULAS = ("Sigmoid", "Div", "Erf", "Add", "Mul")
"""Operators that the formulas consist of."""


def fuse_activations(graph: ir.Graph, names: ValueNames) -> None:
    """Rewrites every GELU and SiLU of ``graph`` and its subgraphs. In place."""
    for product in list(graph.all_nodes()):
        if product.op_type != "Mul":
            continue
        for factor, other in (product.inputs, tuple(reversed(product.inputs))):
            if factor is not None and (_is_sigmoid_of(other, factor) or _gelu_with_half_inside(product, factor, other)):
                reads = [(reader, index) for reader, index in factor.uses() if _leads_to(reader, product)]
                insert_barrier(factor, reads, names)
                break


def _is_sigmoid_of(value: ir.Value | None, x: ir.Value) -> bool:
    sigmoid = _only_made_by(value, "Sigmoid")
    return sigmoid is not None and sigmoid.inputs[0] is x


def _gelu_with_half_inside(product: ir.Node, x: ir.Value, other: ir.Value | None) -> bool:
    """Says whether ``other`` is ½ · (1 + erf(x / √2)). If so, ``product`` with it becomes a product of ½ (case 1)."""
    half, plus_one = _scaled(other, 0.5)
    added = _only_made_by(plus_one, "Add")
    if half is None or plus_one is None or added is None:
        return False
    erf = next((node for value in added.inputs if (node := _only_made_by(value, "Erf")) is not None), None)
    scaled = None if erf is None else _only_made_by(erf.inputs[0], "Div")
    if scaled is None or scaled.inputs[0] is not x:
        return False
    inner = half.outputs[0].producer()
    assert inner is not None
    constant = next(value for value in inner.inputs if value is not plus_one)
    for index, value in enumerate((x, plus_one)):
        inner.replace_input_with(index, value)
    for index, value in enumerate((inner.outputs[0], constant)):
        product.replace_input_with(index, value)
    return True


def _scaled(value: ir.Value | None, factor: float) -> tuple[ir.Node | None, ir.Value | None]:
    """The Mul that makes ``value`` by scaling another one by ``factor``, and that one."""
    product = _only_made_by(value, "Mul")
    for index, each in enumerate(product.inputs if product is not None else ()):
        constant = None if each is None else ir.convenience.get_const_tensor(each)
        if product is not None and constant is not None and constant.size == 1 and constant.numpy().item() == factor:
            return product, product.inputs[1 - index]
    return None, None


def _only_made_by(value: ir.Value | None, op: str) -> ir.Node | None:
    """The node of kind ``op`` that makes ``value`` for one reader; else ``None``."""
    producer = None if value is None or len(value.uses()) != 1 or value.is_graph_output() else value.producer()
    return producer if producer is not None and producer.op_type == op else None


def _leads_to(node: ir.Node, product: ir.Node) -> bool:
    """Says whether ``node`` is part of the formula that ends in ``product``."""
    while node is not product:
        readers = [reader for reader, _ in node.outputs[0].uses()]
        if len(readers) != 1 or node.op_type not in FORMULAS:
            return False
        (node,) = readers
    return True
