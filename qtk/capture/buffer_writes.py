"""Captures the buffers that forward writes, and keeps what a call returns apart from them.

Torch's exporter drops what forward assigns to buffers of submodules, ``self.h = new`` (seen in 2.15), fails where an
input or another buffer is assigned, and writes all buffers in place at the end of a graph. What is in the memory of a
buffer, and is returned or written into another one, has changed by then; and where the value that a buffer takes is
returned too, the exporter returns the buffer, which the next call changes.

What a buffer takes is detached where the float model has no gradients there: the learned ranges of a simulation would
give it some, and keep the graph of the last call.

A buffer that one graph of a model writes is data in all graphs: a graph that only reads it returns it, so that it is a
state of their files too.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.module import register_module_buffer_registration_hook

from qtk.graph.captured_graph import CapturedGraph
from qtk.graph.sites import OP, OWNER, add_labels
from qtk.graph.value_kinds import CLOCK, is_clock
from qtk.graph.written_buffers import READ, WRITE, is_write, is_written, written_buffers
from qtk.nn.kept_buffers import BufferPlace, buffer_places
from qtk.operators.targets import attribute
from qtk.torch_private import base_of, pytree

DETACH = torch.ops.aten.detach.default


@contextmanager
def assigned_in_place(model: nn.Module) -> Iterator[None]:
    """While the body runs, each call of ``model`` ends by writing what it assigned to buffers into the buffers."""
    before: list[dict[BufferPlace, Tensor | None]] = []
    given: set[int] = set()

    def enter(model: nn.Module, args: object, kwargs: object) -> None:
        before.append({(module, name): module._buffers[name] for module, name in buffer_places(model)})
        tensors = itertools.chain(pytree.tree_leaves((args, kwargs)), model.parameters(), model.buffers())
        given.update(id(leaf) for leaf in tensors if isinstance(leaf, Tensor))

    def assign(module: nn.Module, name: str, value: Tensor | None) -> Tensor | None:
        return value.view_as(value) if before and value is not None and id(value) in given else None

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

    handles = [model.register_forward_pre_hook(enter, prepend=True, with_kwargs=True),
               model.register_forward_hook(leave),
               register_module_buffer_registration_hook(assign)]  # type: ignore[arg-type]  # it may return a tensor
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_in(leaf: object, buffers: Sequence[Tensor]) -> bool:
    """Says whether a tensor is one of ``buffers`` or a view of one."""
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


def detach_writes(graph: fx.Graph, root: nn.Module, *, inputs_carry: bool) -> None:
    """Detaches what a graph writes to buffers where the float model has no gradients there. Changes ``graph``.

    Learned ranges would give such a value gradients, and the buffer would keep the graph of each call for the next
    one, whose backward pass fails. A value that depends on a parameter is left as it is: the float model has its
    gradients too, and a loss over several calls needs them, whether the parameter is frozen now or not.

    Args:
        graph: the graph, whose reads of buffers are copies.
        root: holds what the graph reads and calls.
        inputs_carry: whether the inputs may be values that other modules have computed.
    """
    values = {buffer.held: buffer.value for buffer in written_buffers(graph).values()}
    for write in [node for node in graph.nodes if is_write(node)]:
        value = write.args[1]
        assert isinstance(value, fx.Node)
        if value.target is not DETACH and not _has_gradients(value, values, root, inputs_carry=inputs_carry):
            with graph.inserting_before(write):
                detached = graph.call_function(DETACH, (value,))
            detached.meta = dict(value.meta)
            write.args = (write.args[0], detached)


def _has_gradients(value: fx.Node, values: dict[fx.Node, fx.Node], root: nn.Module, *, inputs_carry: bool) -> bool:
    """Says whether a value may depend on a parameter or, with ``inputs_carry``, an input, in calls before too.

    Args: values: buffer → the value that it takes.
    """
    seen, pending = set[fx.Node](), [value]
    while pending:
        node = pending.pop()
        if node in seen or node.target is DETACH:
            continue
        seen.add(node)
        if node.op == "placeholder" and inputs_carry:
            return True
        if node.op == "get_attr" and isinstance(attribute(root, str(node.target)), nn.Parameter):
            return True
        if node.op == "call_module" and any(True for _ in root.get_submodule(str(node.target)).parameters()):
            return True
        pending += [*node.all_input_nodes, *([values[node]] if node in values else [])]
    return False


def pass_on_buffers(graphs: Collection[CapturedGraph]) -> None:
    """Makes each graph that only reads a buffer which another one writes write its value back. Changes ``graphs``."""
    written = {
        id(attribute(graph, str(buffer.held.target))): buffer.read is not None and is_clock(buffer.read)
        for graph in graphs for buffer in written_buffers(graph.graph).values()
    }
    for graph in graphs:
        reads: dict[int, list[fx.Node]] = {}
        for node in graph.graph.find_nodes(op="get_attr"):
            key = id(attribute(graph, str(node.target)))
            if key in written and not is_written(node):
                reads.setdefault(key, []).append(node)
        for key, nodes in reads.items():
            read = _pass_on(graph.graph, nodes)
            if written[key]:
                add_labels(read, **{CLOCK: "true"})
        if reads:
            graph.recompile()


def _pass_on(graph: fx.Graph, nodes: Sequence[fx.Node]) -> fx.Node:
    """Makes a graph write back the buffer that all of ``nodes`` hold. Returns: what the graph reads of it."""
    held, *others = nodes
    with graph.inserting_after(held):
        read = graph.call_function(READ, (held,))
    for node in nodes:
        node.replace_all_uses_with(read, delete_user_cb=lambda user: user is not read)
    for node in others:
        graph.erase_node(node)
    with graph.inserting_before(graph.output_node()):
        write = graph.call_function(WRITE, (held, read))
    for node in (read, write):
        node.meta = dict(held.meta)
        add_labels(node, **{OWNER: "", OP: node.name})
    return read
