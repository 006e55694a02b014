"""The inputs and outputs of an exported file: those of the model, behind them the buffers that forward writes.

Such a buffer is a state: an input that holds its value before the call, and an output that holds the one after it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import quote

import torch
from torch import Tensor, fx, nn

from qtk.calls.calls import Call
from qtk.calls.inputs import input_leaves, is_free
from qtk.calls.served_sizes import Axis
from qtk.calls.signature import input_names, output_nodes
from qtk.capture.prepared_model import PreparedGraph
from qtk.capture.untouched import untouched
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


def free_axes(node: fx.Node) -> list[int]:
    """The axes of an input whose lengths may vary."""
    value = node.meta.get("val")
    shape = value.shape if isinstance(value, Tensor) else ()
    return [axis for axis, length in enumerate(shape) if is_free(length)]


def doubled(leaf: object, axes: list[int]) -> object:
    """A copy of an input with length 2 instead of 1 along free axes, because torch.export fixes a length of 1."""
    for axis in axes:
        if isinstance(leaf, Tensor) and leaf.shape[axis] == 1:
            leaf = leaf.repeat_interleave(2, axis)
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


@dataclass(frozen=True, slots=True)
class EqualAxes:
    """Axes of inputs that have one length, and its name; ``None``: no name was given."""

    axes: frozenset[Axis]
    name: str | None = None


def equal_axes(model: fx.GraphModule) -> tuple[EqualAxes, ...]:
    """The free axes of the inputs of a prepared graph, those together that have one length, in order.

    They have it by the code of the model (one symbol), by the ops that fail otherwise (``ties``), or by a given name.
    """
    symbol: dict[Axis, str] = {
        (str(node.target), axis): str(node.meta["val"].shape[axis])
        for node in model.graph.find_nodes(op="placeholder") for axis in free_axes(node)
    }
    sizes = model.sizes if isinstance(model, PreparedGraph) else None
    name = {axis: given for axis, given in ({} if sizes is None else sizes.names).items() if axis in symbol}
    links = [[axis for axis in symbol if symbol[axis] == each] for each in dict.fromkeys(symbol.values())]
    links += [[axis for axis in name if name[axis] == each] for each in dict.fromkeys(name.values())]
    links += [[axis for axis in tied if axis in symbol] for tied in ([] if sizes is None else sizes.ties)]
    groups: list[set[Axis]] = []
    for link in links:
        joined = set(link).union(*(group for group in groups if not group.isdisjoint(link)))
        groups = [group for group in groups if group.isdisjoint(link)] + [joined]
    order = [*symbol]
    groups.sort(key=lambda group: min(order.index(axis) for axis in group))
    return tuple(EqualAxes(frozenset(group), next((given for axis, given in name.items() if axis in group), None))
                 for group in groups if group)


def tensor_outputs(model: fx.GraphModule, call: Call) -> list[Tensor]:
    """The outputs of the file of a graph in a call, in eval mode; what the call writes into the model is undone."""
    with untouched(model), evaluating(model), torch.no_grad():
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
