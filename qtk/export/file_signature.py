"""Names an exported file, its inputs and its outputs; the buffers that forward writes come last in both.

Such a buffer is a state: an input that holds its value before the call, and an output that holds its value after it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import quote

import torch
from torch import Tensor, fx, nn

from qtk.calls.calls import Call
from qtk.calls.inputs import input_leaves
from qtk.calls.signature import input_names, output_nodes
from qtk.capture.restored import restored
from qtk.core.free_name import unique
from qtk.graph.written_buffers import buffer_values, write_buffers, written_buffers
from qtk.nn.eval_mode import evaluating
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

    Raises: CaptureError if the arguments are not nested as in the call that the model was prepared with.
    """
    leaves = zip(input_names(graph), input_leaves(graph.graph, call.args, call.kwargs), strict=True)
    given = [leaf for _, leaf in leaves if isinstance(leaf, Tensor)]
    held = {**buffer_values(graph), **call.buffers}
    return dict(zip(file_signature(graph).inputs, [*given, *held.values()], strict=True))


def file_outputs(graph: fx.GraphModule, result: object) -> list[Tensor]:
    """The values of the outputs of the file of ``graph``, after a call that returned ``result``."""
    return [*tensors(pytree.tree_leaves(result)), *buffer_values(graph).values()]


def tensors(leaves: Iterable[object]) -> list[Tensor]:
    """The tensors among ``leaves``, in order."""
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def tensor_outputs(model: fx.GraphModule, call: Call) -> list[Tensor]:
    """The outputs of the file of a graph in a call, in eval mode; what the call writes into the model is undone."""
    with restored(model), evaluating(model), torch.no_grad():
        write_buffers(model, call.buffers)
        result = nn.Module.__call__(model, *call.args, **call.kwargs)  # of this graph, not of a variant of it
        return [value.detach().clone() for value in file_outputs(model, result)]


LONGEST = 200
"""Characters of a stem; file systems allow 255 bytes, and ``.onnx.data`` and the like come behind it."""


def file_stem(path: str) -> str:
    """The stem of the file of a module path; different paths have different stems.

    >>> file_stem("backbone.body")
    'backbone.body'

    Other characters than letters, digits and ``_.-~@`` are percent-encoded:

    >>> file_stem("/x/evil"), file_stem("..")
    ('%2Fx%2Fevil', '%2E.')

    A long path ends in its hash:

    >>> file_stem("a" * 300)[-22:]
    'aaaaa+8b397aa4c75429a2'
    """
    stem = quote(path, safe="@", errors="surrogatepass")
    if stem.startswith("."):  # a hidden file, or the directory itself
        stem = f"%2E{stem[1:]}"
    if len(stem) <= LONGEST:
        return stem
    digest = hashlib.blake2b(path.encode(errors="surrogatepass"), digest_size=8).hexdigest()
    return f"{stem[:LONGEST - 1 - len(digest)]}+{digest}"  # a + of the path itself would be %2B
