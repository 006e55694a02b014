"""The buffers that a captured graph writes: states, each read as the call before left it.

Functionalization leaves one op that writes, ``aten.copy_``, and puts its calls behind all other ops of the graph. What
the graph reads of a buffer that it writes is a copy, ``aten.clone``: a backward pass needs the value of before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, fx

from qtk.operators.targets import attribute, path_of

WRITE, READ = torch.ops.aten.copy_.default, torch.ops.aten.clone.default


class WrittenBuffer(NamedTuple):
    """A buffer that a graph writes.

    Args:
        held: the node that holds it.
        read: the node that copies it for the ops of the graph; ``None`` if none reads it.
        value: the node whose value it takes for the next call.
    """

    held: fx.Node
    read: fx.Node | None
    value: fx.Node


def written_buffers(graph: fx.Graph) -> dict[str, WrittenBuffer]:
    """Name in the module of the graph → buffer, in the order in which ``graph`` writes them."""
    buffers = {}
    for node in graph.nodes:
        if is_write(node):
            held, value = node.args
            read = next((user for user in held.users if is_state(user)), None)
            buffers[path_of(held.target)] = WrittenBuffer(held, read, value)
    return buffers


def is_write(node: fx.Node) -> bool:
    """Says whether ``node`` writes a buffer."""
    return node.target is WRITE and isinstance(node.args[0], fx.Node) and node.args[0].op == "get_attr"


def is_state(node: fx.Node) -> bool:
    """Says whether ``node`` reads a buffer that its graph writes, whose value is data."""
    return node.target is READ and isinstance(held := node.args[0], fx.Node) and is_written(held)


def is_written(node: fx.Node) -> bool:
    """Says whether ``node`` holds a buffer that its graph writes."""
    return node.op == "get_attr" and any(is_write(user) and user.args[0] is node for user in node.users)


def is_input(node: fx.Node) -> bool:
    """Says whether the value of ``node`` is data that the graph does not compute: an argument, or a state."""
    return node.op == "placeholder" or is_state(node)


def buffer_values(module: fx.GraphModule) -> dict[str, Tensor]:
    """Name → a copy of the present value of every buffer that the graph of ``module`` writes."""
    return {
        name: attribute(module, str(buffer.held.target)).detach().clone()
        for name, buffer in written_buffers(module.graph).items()
    }


def read_values(module: fx.GraphModule, values: Mapping[str, Tensor]) -> dict[fx.Node, Tensor]:
    """Node that reads a buffer which the graph of ``module`` writes → its value in ``values``, else the present one."""
    held = {**buffer_values(module), **values}
    buffers = written_buffers(module.graph).items()
    return {buffer.read: held[name] for name, buffer in buffers if buffer.read is not None}


@torch.no_grad()
def write_buffers(module: fx.GraphModule, values: Mapping[str, Tensor]) -> None:
    """Gives buffers that the graph of ``module`` writes their values, by name. Changes ``module``."""
    buffers = written_buffers(module.graph)
    for name, value in values.items():
        attribute(module, str(buffers[name].held.target)).copy_(value)
