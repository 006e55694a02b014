"""Moves codes in place of the values that they stand for, where ONNX Runtime does not.

It looks for DequantizeLinear directly in front of a product, and carries it there itself (seen in 1.31) through
Reshape, Transpose, Squeeze, Unsqueeze and Slice. The cases that it leaves, and mostly with them the product in float:

1. Gather, Split and Expand, where queries, keys and values are parts of one tensor.
2. Pad with zeros, whose code is the zero point; windows of attention are padded. And Where that writes zeros, as over
   the steps beyond the lengths of sequences.
3. Concat of parts of one quantized value, as ``roll`` is exported; in front of Gather and Where also of values with one
   encoding, as both directions of a recurrent net.
4. MaxPool, which it leaves in float where several readers round the result to grids of their own.
5. Shape, for which it would dequantize the tensor.
6. Resize to the nearest element, Tile, GatherND, GatherElements and ReduceMax, in files for ONNX Runtime alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np
import onnx_ir as ir

from qtk.export.onnx.names import ValueNames
from qtk.export.onnx.node_writer import (
    DequantizeNodes,
    codes_of,
    dequantize_of,
    have_equal_encodings,
    is_integer,
)

CARRIED = ("MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")
"""Operators that ONNX Runtime carries QuantizeLinear and DequantizeLinear through."""

FOLLOWED = (*CARRIED, "Identity")
"""The same, and one that it removes."""

NOT_CARRIED = ("Gather", "Split", "Expand", "Pad", "Where", "Concat", "MaxPool")

OF_ORDERED_CODES = ("MaxPool", "Resize", "Tile", "GatherND", "GatherElements", "ReduceMax")
"""Operators whose results are elements of their first input, or the largest of some, where ``takes_codes`` says so."""

POOLED = ir.DataType.UINT8
"""The type of the codes that MaxPool moves; int8 ones it takes, too, but a Conv whose codes it reads stays in float."""

CHOSEN = (ir.DataType.UINT8, ir.DataType.INT8)
"""The types of codes that Where chooses from; ONNX Runtime (1.32) has no kernel for codes of 16 bits."""


def move_codes(graph: ir.Graph, names: ValueNames, operators: Collection[str] = NOT_CARRIED) -> None:
    """Lets the operators of these cases, and operators in front that move values, move codes. In place."""
    nodes = DequantizeNodes(names)
    for node in list(graph):
        if node.op_type == "Shape" and (dequantize := dequantize_of(node.inputs[0])) is not None:
            node.replace_input_with(0, codes_of(dequantize))
        if node.op_type in operators and takes_codes(node):
            for mover in dict.fromkeys(mover for index in _data(node) for mover in _movers(node.inputs[index])):
                _move(mover, nodes)
            data = node.inputs[_data(node)[0]]
            joined = None if data is None else data.producer()
            if joined is not None and joined.op_type == "Concat" and node.op_type in ("Gather", "Where"):
                _move(joined, nodes, are_alike=have_equal_encodings)
            _move(node, nodes)


def takes_codes(node: ir.Node) -> bool:
    """Says whether an operator computes with codes what it computes with values, by its attributes and results."""
    if node.op_type == "Resize":
        mode = node.attributes.get("mode")
        return mode is None or mode.as_string() == "nearest"
    return node.op_type != "MaxPool" or len(node.outputs) == 1


def _data(node: ir.Node) -> Sequence[int]:
    """The inputs whose elements the operator moves."""
    if node.op_type == "Where":
        return [1] if _constant(node.inputs[1]) is None else [2]
    return range(len(node.inputs)) if node.op_type == "Concat" else [0]


def _constant(value: ir.Value | None) -> ir.TensorProtocol | None:
    return None if value is None else ir.convenience.get_const_tensor(value)


def _movers(value: ir.Value | None) -> Iterator[ir.Node]:
    """The operators between a DequantizeLinear and ``value``, in order; none if another operator made it."""
    chain: list[ir.Node] = []
    while value is not None and dequantize_of(value) is None:
        producer = value.producer()
        if producer is None or producer.op_type not in FOLLOWED:
            return
        chain.append(producer)
        value = producer.inputs[0]
    yield from reversed(chain)


def carries_codes(value: ir.Value | None) -> bool:
    """Says whether ONNX Runtime carries a DequantizeLinear of computed codes to ``value``."""
    dequantize = dequantize_of(value)
    if dequantize is not None:
        return not codes_of(dequantize).is_initializer()
    producer = None if value is None else value.producer()
    return producer is not None and producer.op_type in FOLLOWED and carries_codes(producer.inputs[0])


def _have_one_encoding(a: ir.Node, b: ir.Node) -> bool:
    """Says whether two DequantizeLinear read the same scale and zero point."""
    return bool(a.inputs[1:] == b.inputs[1:])


def _move(
    node: ir.Node, nodes: DequantizeNodes, are_alike: Callable[[ir.Node, ir.Node], bool] = _have_one_encoding
) -> None:
    """Lets ``node`` move codes, if ``are_alike`` holds for the encodings of all values that it moves."""
    sources = {index: dequantize_of(node.inputs[index]) for index in _data(node)}
    first = next(iter(sources.values()))
    if first is None or codes_of(first).is_initializer() or not is_integer(codes_of(first).dtype):
        return
    if any(source is None or not are_alike(source, first) for source in sources.values()):
        return
    if node.op_type in OF_ORDERED_CODES and codes_of(first).dtype != POOLED:
        return
    if node.op_type == "Where" and codes_of(first).dtype not in CHOSEN:
        return
    if node.op_type in ("Pad", "Where") and not _fill_with_code_of_zero(node, first):
        return
    for index, source in sources.items():
        assert source is not None
        node.replace_input_with(index, codes_of(source))
    for value in node.outputs:
        nodes.behind(value, first)


def _fill_with_code_of_zero(node: ir.Node, dequantize: ir.Node) -> bool:
    """Lets an operator that writes zeros write the zero point. Returns: whether it does, or copies values."""
    mode = node.attributes.get("mode")
    if mode is not None and mode.as_string() != "constant":
        return True
    index = 1 if [*_data(node)] == [2] else 2
    fill = node.inputs[index] if len(node.inputs) > index else None
    if fill is not None:
        constant = _constant(fill)
        if constant is None or np.any(constant.numpy()):
            return False
        node.replace_input_with(index, dequantize.inputs[2])
        return True
    node.resize_inputs(max(3, len(node.inputs)))
    node.replace_input_with(2, dequantize.inputs[2])
    return True
