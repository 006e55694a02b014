"""Max of one input returns it, and ends what ONNX Runtime carries a DequantizeLinear through (seen in 1.31 and 1.32).

Identity, Reshape and local functions do not: they are removed, carried through, or written out first.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from qtk.core.free_name import free_name
from qtk.export.onnx.node_writer import value_of
from qtk.export.onnx.onnxruntime.moved_codes import carries_codes
from qtk.export.onnx.value_names import ValueNames


def read_through_max(x: ir.Value, reads: Iterable[tuple[ir.Node, int]], names: ValueNames) -> None:
    """Lets nodes, each at the index of one of its inputs, read ``x`` through Max, if ``x`` is dequantized. In place."""
    if carries_codes(x):
        max_behind(x, reads, names)


def max_behind(x: ir.Value, reads: Iterable[tuple[ir.Node, int]], names: ValueNames) -> None:
    """Lets nodes, each at the index of one of its inputs, read ``x``, made by a node, through Max. In place."""
    same = ir.node("Max", [x], outputs=[value_of(x.dtype, x.shape)])
    names.give(same.outputs[0], names.free(f"{x.name}/Max"))
    producer = x.producer()
    assert producer is not None
    assert producer.graph is not None
    same.name = free_name(str(same.outputs[0].name), {node.name for node in producer.graph})
    producer.graph.insert_after(producer, same)
    for reader, index in reads:
        reader.replace_input_with(index, same.outputs[0])
