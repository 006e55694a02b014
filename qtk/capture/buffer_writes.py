"""Captures the buffers that forward writes, and keeps what a call returns apart from them.

Torch's exporter drops what forward assigns to buffers of submodules, ``self.h = new`` (seen in 2.15), and
writes all buffers in place at the end of a graph. What is in the memory of a buffer, and is returned or written into
another one, has changed by then; and where the value that a buffer takes is returned too, the exporter returns the
buffer, which the next call changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, fx, nn

from qtk.graph.written_buffers import READ, is_write
from qtk.nn.kept_buffers import BufferPlace, buffer_places
from qtk.torch_private import base_of, pytree


@contextmanager
def assigned_in_place(model: nn.Module) -> Iterator[None]:
    """While the body runs, each call of ``model`` ends by writing what it assigned to buffers into the buffers."""
    before: list[dict[BufferPlace, Tensor | None]] = []

    def enter(model: nn.Module, args: object) -> None:
        before.append({(module, name): module._buffers[name] for module, name in buffer_places(model)})

    def leave(model: nn.Module, args: object, output: object) -> object:
        assigned = [(module, name, buffer, value) for (module, name), buffer in before.pop().items()
                    if (value := module._buffers.get(name)) is not None and value is not buffer and buffer is not None
                    and (value.shape, value.dtype) == (buffer.shape, buffer.dtype)]
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


def _is_in(leaf: object, buffers: Sequence[Tensor]) -> bool:
    """Whether a tensor is one of ``buffers`` or a view of one."""
    return isinstance(leaf, Tensor) and any(leaf is buffer or base_of(leaf) is buffer for buffer in buffers)


def part_from_buffers(graph: fx.Graph) -> None:
    """Makes a graph read copies of the buffers that it writes, and return values, not buffers. Changes ``graph``."""
    for write in [node for node in graph.nodes if is_write(node)]:
        held, value = write.args
        assert isinstance(held, fx.Node)
        assert isinstance(value, fx.Node)
        write.replace_all_uses_with(value)
        with graph.inserting_after(held):
            read = graph.call_function(READ, (held,))
        read.meta = dict(held.meta)
        for user in [user for user in held.users if user is not read]:
            if not (is_write(user) and user.args[0] is held):
                user.replace_input_with(held, read)
