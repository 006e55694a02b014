"""The inputs and outputs of an exported file: those of the model, and behind them the buffers that forward writes.

Such a buffer is a state: an input that holds its value before the call, and an output that holds the one after it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, fx

from qtk.calls.calls import Call
from qtk.calls.inputs import input_leaves
from qtk.calls.signature import input_names, output_nodes
from qtk.core.free_name import unique
from qtk.graph.written_buffers import buffer_values, written_buffers
from qtk.torch_private import pytree

NEXT = "_out"
"""Behind the name of a buffer: the name of the output that is its value in the next call."""


@dataclass(frozen=True, slots=True, eq=False)
class FileSignature:
    """The names of a file's inputs and outputs.

    Args:
        inputs: name → node whose value it is, of the tensors that the model takes; the buffers are the last.
        outputs: name → node likewise, of the tensors that it returns.
        buffers: name of a buffer → names of its input and its output.
    """

    inputs: dict[str, fx.Node]
    outputs: dict[str, fx.Node]
    buffers: dict[str, tuple[str, str]]


def file_signature(graph: fx.GraphModule) -> FileSignature:
    """The signature of the file of a graph; an input and an output of one name are told apart by a suffix.

    >>> import qtk, torch
    >>> class Sum(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.register_buffer("total", torch.zeros(2, 3))
    ...     def forward(self, x):
    ...         self.total += x
    ...         return self.total.mean()
    >>> signature = file_signature(qtk.prepare_model(Sum(), torch.randn(2, 3)))
    >>> [*signature.inputs], [*signature.outputs], signature.buffers
    (['x', 'total'], ['output', 'total_out'], {'total': ('total', 'total_out')})
    """
    given = {str(node.target): node for node in graph.graph.find_nodes(op="placeholder")
             if isinstance(node.meta.get("val"), Tensor)}
    returned, buffers = output_nodes(graph), written_buffers(graph.graph)
    wanted = [*given, *buffers, *returned, *(f"{name}{NEXT}" for name in buffers)]
    nodes = [*given.values(), *(buffer.read or buffer.held for buffer in buffers.values()),
             *returned.values(), *(buffer.value for buffer in buffers.values())]
    named = list(zip(unique(wanted), nodes, strict=True))
    inputs, outputs = dict(named[:len(given) + len(buffers)]), dict(named[len(given) + len(buffers):])
    pairs = zip([*inputs][len(given):], [*outputs][len(returned):], strict=True)
    return FileSignature(inputs, outputs, dict(zip(buffers, pairs, strict=True)))


def file_inputs(graph: fx.GraphModule, call: Call) -> dict[str, Tensor]:
    """Name → value of every input of the file of ``graph`` in a call.

    Raises: CaptureError if the arguments are not nested as those that the model was prepared with.
    """
    leaves = zip(input_names(graph), input_leaves(graph.graph, call.args, call.kwargs), strict=True)
    given = [leaf for _, leaf in leaves if isinstance(leaf, Tensor)]
    held = {**buffer_values(graph), **call.buffers}
    return dict(zip(file_signature(graph).inputs, [*given, *held.values()], strict=True))


def file_outputs(graph: fx.GraphModule, result: object) -> list[Tensor]:
    """The values of the outputs of the file of ``graph``, after a call that returned ``result``."""
    return [*tensors(pytree.tree_leaves(result)), *buffer_values(graph).values()]


def tensors(leaves: Iterable[object]) -> list[Tensor]:
    """Those of ``leaves`` that are tensors."""
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
