"""Captures the buffers that forward writes, and keeps what a call returns apart from them.

Torch's exporter drops what forward assigns to buffers of submodules, ``self.h = new`` (seen in 2.15), and
writes all buffers in place at the end of a graph. What is in the memory of a buffer, and is returned or written into
another one, has changed by then; and where the value that a buffer takes is returned too, the exporter returns the
buffer, which the next call changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, fx, nn

from qtk.graph.op_row import Role
from qtk.graph.op_table import row_of
from qtk.graph.written_buffers import is_state, is_write
from qtk.nn.kept_buffers import BufferPlace, buffer_places
from qtk.torch_private import pytree

CLONE = torch.ops.aten.clone.default


@contextmanager
def assigned_in_place(model: nn.Module) -> Iterator[None]:
    """While the body runs, each call of ``model`` ends by writing what it assigned to buffers into the buffers."""
    before: list[dict[BufferPlace, Tensor | None]] = []

    def enter(model: nn.Module, args: object) -> None:
        before.append({(module, name): module._buffers[name] for module, name in buffer_places(model)})

    def leave(model: nn.Module, args: object, output: object) -> object:
        assigned = [(module, name, buffer, value) for (module, name), buffer in before.pop().items()
                    if _can_be_written(buffer, value := module._buffers.get(name))]
        buffers = [buffer for _, _, buffer, _ in assigned]
        returned = pytree.tree_map(lambda leaf: leaf.clone() if _is_in(leaf, buffers) else leaf, output)
        values = [value.clone() if _is_in(value, buffers) else value for _, _, _, value in assigned]
        for (module, name, buffer, _), value in zip(assigned, values, strict=True):
            buffer.copy_(value)
            module._buffers[name] = buffer
        return returned if assigned else None

    handles = [model.register_forward_pre_hook(enter, prepend=True), model.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _can_be_written(buffer: Tensor | None, value: Tensor | None) -> bool:
    """Whether ``value`` was assigned to a buffer and fits into it."""
    return buffer is not None and value is not None and value is not buffer and (
        (value.shape, value.dtype) == (buffer.shape, buffer.dtype))


def _is_in(leaf: object, buffers: Sequence[Tensor]) -> bool:
    """Whether a tensor is one of ``buffers`` or a view of one."""
    return isinstance(leaf, Tensor) and any(leaf is buffer or leaf._base is buffer for buffer in buffers)


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
