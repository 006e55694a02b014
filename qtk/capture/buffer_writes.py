"""Keeps what a call returns apart from the buffers that it writes.

Torch's exporter writes all buffers in place at the end of a graph. What is in the memory of a buffer, and is returned
or written into another one, has changed by then; and where the value that a buffer takes is returned too, the exporter
returns the buffer, which the next call changes.
"""

from __future__ import annotations

import torch
from torch import fx

from qtk.graph.op_row import Role
from qtk.graph.op_table import row_of
from qtk.graph.written_buffers import is_state, is_write

CLONE = torch.ops.aten.clone.default


def part_from_buffers(graph: fx.Graph) -> None:
    """Makes copies of the values in the memory of a buffer that is written before they are read. Changes ``graph``."""
    writes = [node for node in graph.nodes if is_write(node)]
    if not writes:
        return
    for write in writes:
        value = write.args[1]
        assert isinstance(value, fx.Node)
        write.replace_all_uses_with(value)  # the value that is returned, not the buffer that has it
    for reader in [*writes, graph.output_node()]:
        for value in reader.all_input_nodes:
            if _shares_memory(value) and not (is_write(reader) and reader.args[0] is value):
                reader.replace_input_with(value, _copied(value, writes[0]))


def _copied(value: fx.Node, before: fx.Node) -> fx.Node:
    with before.graph.inserting_before(before):
        copy = before.graph.call_function(CLONE, (value,))
    copy.meta = dict(value.meta)
    return copy


def _shares_memory(value: fx.Node) -> bool:
    """Whether a value may be in the memory of a buffer that its graph writes."""
    while value.op in ("call_function", "call_module") and value.target is not CLONE:
        row = row_of(value)
        if row is None or row.role is not Role.MOVEMENT:
            return False
        value = value.all_input_nodes[0]
    return is_state(value)
